"""Operations, traffic and memory of every rank, computed exactly from the placement of `kfac_core`.

Bytes, calls and state equal what `kfac_core` counts when it runs, for every strategy and rank. FLOPs are
those of the plain formulas; kernels may need fewer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from analysis.prediction.networks import Network
from kfac_core.config import ITEM_BYTES, KFACConfig
from kfac_core.phases import Phase
from kfac_core.placement import FactorJob, FactorShape, LayerShape, Placement, Ranks
from kfac_core.placement.balance import buckets
from kfac_core.placement.placement import data_elements, precondition_flops
from kfac_core.placement.strategies import place
from kfac_core.schedule import interval_at

Load = TypeVar("Load", int, float)
Operation = Literal["all_reduce", "reduce_parts", "gather_parts"]
ITEM = 4  # bytes of a gradient and of the working precision


@dataclass(frozen=True)
class Setup:
    """One arm at one world size.

    Attributes:
        config: of K-FAC, or None for the optimizer alone.
        layerwise: every layer is sent by itself and inverses as triangles, as in the SPD-KFAC release; the
            trainer sends everything that a rank owns in one message.
    """

    network: Network
    config: KFACConfig | None
    world_size: int
    local_batch_size: int
    layerwise: bool = False

    @cached_property
    def shapes(self) -> list[LayerShape]:
        """The layers' shapes, with the diagonals that K-FAC keeps of large factors."""
        largest = self.config.max_factor_dim if self.config else None
        return [shape.bounded(largest) for shape in self.network.shapes]

    @cached_property
    def factor_update_steps(self) -> int:
        """F at the first step; without K-FAC 1."""
        return interval_at(self.config.factor_update_steps, 0, 1) if self.config else 1

    @cached_property
    def inverse_update_steps(self) -> int:
        """E at the first step; without K-FAC 1."""
        return interval_at(self.config.inverse_update_steps, 0, 1) if self.config else 1


@dataclass(frozen=True)
class Exchange:
    """One operation of a communicator.

    Attributes:
        group: the participating ranks; other groups may run the same operation concurrently.
        sizes: bytes of each member's part, in the order of `group`; of an all-reduce the one buffer.
        steps: interval between two such exchanges.
        messages: number of collectives, if it is not one per part.
    """

    phase: Phase
    operation: Operation
    group: Ranks
    sizes: tuple[int, ...]
    steps: int
    messages: int | None = None

    @property
    def parts(self) -> int:
        """Number of collectives: one for each part that is not empty, unless `messages` is set."""
        return self.messages if self.messages is not None else sum(size > 0 for size in self.sizes)


class Work:
    """The work of every rank of one arm."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.world_size = setup, setup.world_size
        self.placement: Placement | None = None
        self.jobs: list[FactorJob] = []
        if setup.config is not None:
            self.placement = place(setup.config, setup.shapes, setup.world_size)
            self.jobs = self.placement.factor_jobs(setup.shapes)

    @cached_property
    def exchanges(self) -> list[Exchange]:
        """All exchanges. All rows exchange the same sizes, so only the first is listed."""
        if self.world_size == 1:
            return []
        everyone, gradients = tuple(range(self.world_size)), ITEM * self.setup.network.parameters
        found = [Exchange(Phase.GRADIENT_COMM, "all_reduce", everyone, (gradients,), 1, self._layerwise)]
        if self.placement is not None:
            found += [*self._factor_exchanges(everyone), *self._inverse_exchanges(self.placement, everyone)]
            found += self._gradient_exchanges(self.placement)
        return found

    @cached_property
    def state_bytes(self) -> dict[str, list[int]]:
        """K-FAC state by kind and rank, as `KFAC.memory` reports it."""
        config = self.setup.config
        if config is None:
            return {}
        factor_item = ITEM_BYTES[config.factor_dtype] if config.factor_dtype else ITEM
        second_item = ITEM_BYTES[config.inverse_dtype] if config.inverse_dtype else ITEM
        gradients = 2 * ITEM * sum(shape.gradient_elements for shape in self.setup.shapes)
        return {
            "factors": self.spread(
                (job.inverse_workers, factor_item * job.shape.elements) for job in self.jobs
            ),
            "second_order": self.spread(
                (job.gradient_workers, second_item * data_elements(config, job.shape)) for job in self.jobs
            ),
            "gradients": [gradients] * self.world_size,
            "statistics": self.spread(
                share
                for job in self.jobs
                for share in (
                    (job.factor_workers, ITEM * job.shape.packed_elements),
                    (job.unpacked_on, ITEM * (job.shape.elements - job.shape.packed_elements)),
                )
            ),
        }

    @property
    def largest_state(self) -> int:
        """Bytes of K-FAC's state on the rank that keeps most."""
        return max((sum(ranks) for ranks in zip(*self.state_bytes.values(), strict=True)), default=0)

    @cached_property
    def inverses(self) -> list[Counter[FactorShape]]:
        """By rank: the factors that it decomposes in an inverse update."""
        everyone: Counter[FactorShape] = Counter()
        own: list[Counter[FactorShape]] = [Counter() for _ in range(self.world_size)]
        for job in self.jobs:
            if len(job.inverse_workers) == self.world_size:
                everyone[job.shape] += 1
            else:
                for rank in job.inverse_workers:
                    own[rank][job.shape] += 1
        return [counts + everyone for counts in own]

    @cached_property
    def precondition_flops(self) -> list[int]:
        """By rank: products with the second-order data of both factors, in every step."""
        if self.placement is None or self.setup.config is None:
            return [0] * self.world_size
        config, layers = self.setup.config, self.placement.layers
        return self.spread(
            (layers[shape.name].gradient_workers, precondition_flops(config, shape))
            for shape in self.setup.shapes
        )

    def _factor_exchanges(self, everyone: Ranks) -> list[Exchange]:
        phase, steps = Phase.FACTOR_COMM, self.setup.factor_update_steps
        overlap = self.setup.config is not None and self.setup.config.overlap_factors
        found = []
        for bucket in buckets(self.jobs, self.world_size, overlap=overlap):
            messages = len(bucket.layers) if self.setup.layerwise else None
            if bucket.sizes is None:
                size = sum(map(_factor_bytes, bucket.jobs))
                found.append(Exchange(phase, "all_reduce", everyone, (size,), steps, messages))
                continue
            sizes = [0] * self.world_size
            for job in bucket.jobs:
                sizes[job.inverse_workers[0]] += _factor_bytes(job)
            found.append(Exchange(phase, "reduce_parts", everyone, tuple(sizes), steps, messages))
        return found

    def _inverse_exchanges(self, placement: Placement, everyone: Ranks) -> list[Exchange]:
        config, steps = self.setup.config, self.setup.inverse_update_steps
        found = []
        apart = any(layer.a_inverse_workers != layer.g_inverse_workers for layer in placement.layers.values())
        if config is not None and config.solver == "inverse_pi" and apart:
            means = 2 * ITEM * len(self.setup.shapes)
            found.append(Exchange(Phase.INVERSE_COMM, "all_reduce", everyone, (means,), steps))
        if placement.grad_workers == 1:
            return found
        by_column: dict[int, dict[int, int]] = {}
        for job in self.jobs:
            if len(job.inverse_workers) == 1:
                owner = job.inverse_workers[0]
                sizes = by_column.setdefault(owner % placement.columns, {})
                sizes[owner] = sizes.get(owner, 0) + self._data_bytes(job)
        for column, sizes in sorted(by_column.items()):
            group = placement.column(column)
            parts = tuple(sizes.get(rank, 0) for rank in group)
            found.append(Exchange(Phase.INVERSE_COMM, "gather_parts", group, parts, steps, self._layerwise))
        return found

    def _gradient_exchanges(self, placement: Placement) -> list[Exchange]:
        if placement.columns == 1:
            return []
        sizes = [0] * placement.columns
        for shape in self.setup.shapes:
            column = placement.layers[shape.name].gradient_workers[0]
            sizes[column] += ITEM * shape.gradient_elements
        return [Exchange(Phase.PRECONDITION_COMM, "gather_parts", placement.row(0), tuple(sizes), 1)]

    @property
    def _layerwise(self) -> int | None:
        return len(self.setup.shapes) if self.setup.layerwise else None

    def _data_bytes(self, job: FactorJob) -> int:
        config = self.setup.config
        assert config is not None  # noqa: S101  without K-FAC there are no jobs
        item = ITEM_BYTES[config.inverse_dtype] if config.inverse_dtype else ITEM
        if self.setup.layerwise and config.solver != "eigen":
            return item * job.shape.packed_elements
        return item * data_elements(config, job.shape)

    def spread(self, loads: Iterable[tuple[Ranks, Load]]) -> list[Load]:
        """By rank, the sum of its loads; loads of the same ranks are added first."""
        by_group: dict[Ranks, Load] = {}
        for ranks, load in loads:
            by_group[ranks] = by_group.get(ranks, 0) + load
        total: list[Load] = [0] * self.world_size
        for ranks, load in by_group.items():
            for rank in ranks:
                total[rank] += load
        return total


def _factor_bytes(job: FactorJob) -> int:
    """Bytes of a factor's triangle and of its loss terms and rows."""
    return ITEM * (2 + job.shape.packed_elements)
