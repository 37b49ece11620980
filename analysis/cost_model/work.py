"""Operations, traffic and memory of every rank, computed exactly from the placement.

Bytes, calls and state equal what `kfac_core` counts when it runs, for every strategy and rank. FLOPs are
those of the plain formulas; kernels may need fewer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from analysis.cost_model.models import Layer, Model
from kfac_core.config import ITEM_BYTES, KFACConfig
from kfac_core.placement import FactorJob, FactorShape, LayerShape, Placement, Ranks
from kfac_core.placement.buckets import buckets
from kfac_core.placement.cost import CostModel
from kfac_core.placement.footprint import data_elements, precondition_flops
from kfac_core.placement.strategies import place
from kfac_core.schedule import interval_at
from kfac_core.timing.phases import Phase

Load = TypeVar("Load", int, float)

Operation = Literal["all_reduce", "reduce_parts", "gather_parts"]


@dataclass(frozen=True)
class Setup:
    """One arm at one world size.

    Attributes:
        config: of K-FAC, or None for the optimizer alone.
        item_bytes: of the working precision.
        packing, inverse_packing: whether a factor, and an explicit inverse, is sent as a `triangle` or as a
            whole `square`; the trainer uses the defaults.
        fusion: whether everything that one rank owns is sent in one message, as in the trainer, or `layer`
            by layer as in the SPD-KFAC release.
        overlap: whether gradients and factors are sent during the backward pass and the factor computation.
        micro_batches: that a rank cuts its local batch into, one after another.
        factor_micro_batches: of them, those that make the factors; None for all.
    """

    model: Model
    config: KFACConfig | None
    world_size: int
    local_batch_size: int
    item_bytes: int = 4
    packing: Literal["triangle", "square"] = "triangle"
    inverse_packing: Literal["triangle", "square"] = "square"
    fusion: Literal["owner", "layer"] = "owner"
    overlap: bool = False
    micro_batches: int = 1
    factor_micro_batches: int | None = None

    @cached_property
    def shapes(self) -> list[LayerShape]:
        """The layers' shapes, with the diagonals that K-FAC keeps of large factors."""
        largest = self.config.max_factor_dim if self.config else None
        return [shape.bounded(largest) for shape in self.model.shapes]

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
    def total_bytes(self) -> int:
        """Size of all parts together."""
        return sum(self.sizes)

    @property
    def parts(self) -> int:
        """Number of collectives: one for each part that is not empty, unless `messages` is set."""
        return self.messages if self.messages is not None else sum(size > 0 for size in self.sizes)

    def sent_by(self, rank: int) -> tuple[int, int]:
        """Calls and bytes that are counted on `rank`, a member."""
        if self.operation == "gather_parts":
            own = self.sizes[self.group.index(rank)]
            return int(own > 0), own
        return self.parts, self.total_bytes


class Work:
    """The work of every rank of one arm.

    Args:
        cost: the machine's cost model for the placement; None for the trainer's default.
    """

    def __init__(self, setup: Setup, cost: CostModel | None = None) -> None:
        self.setup = setup
        self.world_size = setup.world_size
        self.layers: tuple[Layer, ...] = setup.model.layers
        self.placement: Placement | None = None
        self.jobs: list[FactorJob] = []
        if setup.config is not None:
            self.placement = place(setup.config, setup.shapes, setup.world_size, cost)
            self.jobs = self.placement.factor_jobs(setup.shapes)

    @cached_property
    def exchanges(self) -> list[Exchange]:
        """All exchanges. All rows exchange the same sizes, so only the first is listed."""
        if self.world_size == 1:
            return []
        gradients = self.setup.item_bytes * self.setup.model.parameters
        everyone = tuple(range(self.world_size))
        found = [Exchange(Phase.GRADIENT_COMM, "all_reduce", everyone, (gradients,), 1, self._layerwise)]
        if self.placement is not None:
            found += [*self._factor_exchanges(everyone), *self._inverse_exchanges(self.placement, everyone)]
            found += self._gradient_exchanges(self.placement)
        return found

    def traffic(self, rank: int, *, update: bool) -> dict[Phase, tuple[int, int]]:
        """Calls and bytes by phase that `rank` sends in a step with all updates, or with none."""
        found: dict[Phase, tuple[int, int]] = {}
        for exchange in self.exchanges:
            if not update and exchange.phase in (Phase.FACTOR_COMM, Phase.INVERSE_COMM):
                continue
            if exchange.phase == Phase.PRECONDITION_COMM:
                calls, sent = exchange.sent_by(rank % len(exchange.group))  # its position in its own row
            elif rank in exchange.group:
                calls, sent = exchange.sent_by(rank)
            else:
                continue
            before = found.get(exchange.phase, (0, 0))
            found[exchange.phase] = before[0] + calls, before[1] + sent
        return {phase: counted for phase, counted in found.items() if counted[0]}

    @cached_property
    def state_bytes(self) -> dict[str, list[int]]:
        """K-FAC state by kind and rank, as `KFAC.memory` reports it."""
        config, item = self.setup.config, self.setup.item_bytes
        if config is None:
            return {}
        factor_item = ITEM_BYTES[config.factor_dtype] if config.factor_dtype else item
        second_item = ITEM_BYTES[config.inverse_dtype] if config.inverse_dtype else item
        gradients = 2 * item * sum(shape.gradient_elements for shape in self.setup.shapes)
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
                    (job.factor_workers, item * job.shape.packed_elements),
                    (job.unpacked_on, item * (job.shape.elements - job.shape.packed_elements)),
                )
            ),
        }

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
        config = self.setup.config
        return self.spread(
            (self.placement.layers[shape.name].gradient_workers, precondition_flops(config, shape))
            for shape in self.setup.shapes
        )

    def _factor_exchanges(self, everyone: Ranks) -> list[Exchange]:
        phase, steps = Phase.FACTOR_COMM, self.setup.factor_update_steps
        overlap = self.setup.config is not None and self.setup.config.overlap_factors
        found = []
        for bucket in buckets(self.jobs, self.world_size, overlap=overlap):
            messages = len(bucket.layers) if self.setup.fusion == "layer" else None
            if bucket.sizes is None:
                size = sum(map(self._factor_bytes, bucket.jobs))
                found.append(Exchange(phase, "all_reduce", everyone, (size,), steps, messages))
                continue
            sizes = [0] * self.world_size
            for job in bucket.jobs:
                sizes[job.inverse_workers[0]] += self._factor_bytes(job)
            found.append(Exchange(phase, "reduce_parts", everyone, tuple(sizes), steps, messages))
        return found

    def _inverse_exchanges(self, placement: Placement, everyone: Ranks) -> list[Exchange]:
        config, steps = self.setup.config, self.setup.inverse_update_steps
        found = []
        apart = any(layer.a_inverse_workers != layer.g_inverse_workers for layer in placement.layers.values())
        if config is not None and config.solver == "inverse_pi" and apart:
            means = 2 * self.setup.item_bytes * len(self.layers)
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
            sizes[column] += self.setup.item_bytes * shape.gradient_elements
        return [Exchange(Phase.PRECONDITION_COMM, "gather_parts", placement.row(0), tuple(sizes), 1)]

    @property
    def _layerwise(self) -> int | None:
        return len(self.layers) if self.setup.fusion == "layer" else None

    def _factor_bytes(self, job: FactorJob) -> int:
        """Bytes of a factor and of its loss terms and rows."""
        whole = self.setup.packing == "square"
        return self.setup.item_bytes * (2 + (job.shape.elements if whole else job.shape.packed_elements))

    def _data_bytes(self, job: FactorJob) -> int:
        config = self.setup.config
        assert config is not None  # noqa: S101  without K-FAC there are no jobs
        item = ITEM_BYTES[config.inverse_dtype] if config.inverse_dtype else self.setup.item_bytes
        if self.setup.inverse_packing == "triangle" and config.solver != "eigen":
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


def imbalance(loads: Sequence[float]) -> float:
    """The largest load over the mean; 1 where there is none."""
    mean = sum(loads) / len(loads)
    return max(loads) / mean if mean else 1.0
