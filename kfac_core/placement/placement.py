"""Placement: who computes what. A strategy's whole decision as data, which the collectives execute.

A placement arranges the world as KAISA's grid of `m` rows by `n` columns, `m * n = world_size`. Each layer is
assigned to a column. The ranks of a column are the *gradient workers* of its layers: they hold the
second-order data and precondition. Rows receive: in each row, the one member in a layer's column sends the
preconditioned gradient to the others.

    world_size = 8, m = 2 gradient workers:     column  0  1  2  3
                                         row 0          0  1  2  3     rows exchange preconditioned
                                         row 1          4  5  6  7     gradients, columns second-order data

`m = world_size` is COMM-OPT (one column, nothing to exchange in rows), `m = 1` is MEM-OPT and DP-KFAC.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from kfac_core.config import ITEM_BYTES, KFACConfig
from kfac_core.errors import PlacementError

Ranks = tuple[int, ...]

LARGEST_UNPACKED = 320
"""Rows of the largest factor whose grams stay unpacked until the step: see `FactorJob.unpacked_on`."""

_ROWS_SHOWN, _RANKS_SHOWN = 16, 16  # of a printed grid, to fit a screen


@dataclass(frozen=True)
class FactorShape:
    """A symmetric factor: `blocks` independent `dim` by `dim` matrices; one block unless grouped."""

    dim: int
    blocks: int = 1

    @property
    def elements(self) -> int:
        """Elements of the full factor, both triangles."""
        return self.blocks * self.dim**2

    @property
    def packed_elements(self) -> int:
        """Elements of one triangle with its diagonal, as it is sent."""
        return self.blocks * self.dim * (self.dim + 1) // 2


@dataclass(frozen=True)
class LayerShape:
    """A preconditioned layer as placement sees it: its name and its two factors.

    Attributes:
        diagonal: the factors that are diagonal because they are too large: ``, `a`, `g` or `ag`. Each has a
            block for every row of the matrix that it would be.
    """

    name: str
    a: FactorShape
    g: FactorShape
    diagonal: str = ""

    @property
    def gradient_elements(self) -> int:
        """Elements of the gradient matrix `[g.dim, a.dim]` over all blocks."""
        return math.prod(self.gradient_shape)

    @property
    def gradient_shape(self) -> tuple[int, ...]:
        """`[g.dim, a.dim]`, with the blocks of A in front where there are several."""
        if self.diagonal:
            return self.g.blocks * self.g.dim, self.a.blocks * self.a.dim
        matrix = self.g.dim, self.a.dim
        return (self.a.blocks, *matrix) if self.a.blocks > 1 else matrix

    @property
    def has_tokens(self) -> bool:
        """Whether A is diagonal, its blocks the rows of one matrix: an embedding."""
        return self.a.dim == 1 and self.a.blocks > 1 and self.g.blocks == 1 and not self.diagonal

    def bounded(self, largest: int | None) -> LayerShape:
        """With diagonals in the place of dense factors of more than `largest` rows; None for no bound.

        Grouped layers, and the features of an embedding, keep their blocks.
        """
        if largest is None or max(self.a.blocks, self.g.blocks) > 1:
            return self
        a, g = (FactorShape(1, f.dim) if f.dim > largest else f for f in (self.a, self.g))
        return LayerShape(self.name, a, g, "a" * (a != self.a) + "g" * (g != self.g))


@dataclass(frozen=True)
class FactorJob:
    """One factor of one layer with the ranks that work on it.

    Attributes:
        layer: position of the layer in the model's order.
        kind: `a` or `g`.
        factor_workers: ranks whose batches it averages over.
        inverse_workers: ranks that keep its running mean and invert it.
        gradient_workers: ranks that need its second-order data.
    """

    layer: int
    kind: Literal["a", "g"]
    shape: FactorShape
    factor_workers: Ranks
    inverse_workers: Ranks
    gradient_workers: Ranks

    @property
    def is_sent(self) -> bool:
        """Whether its mean involves more than one rank."""
        return len({*self.factor_workers, *self.inverse_workers}) > 1

    @property
    def unpacked_on(self) -> Ranks:
        """Ranks that keep their own statistics as a matrix until the step; others pack them in the hook.

        All ranks do so for small factors, which take little memory and are packed faster one after another.
        For large ones only the rank that alone keeps the factor does, as it sends nothing.
        """
        if self.shape.dim <= LARGEST_UNPACKED:
            return self.factor_workers
        alone = len(self.inverse_workers) == 1 and self.inverse_workers[0] in self.factor_workers
        return self.inverse_workers if alone else ()


@dataclass(frozen=True)
class LayerPlacement:
    """One layer's ranks, each tuple ascending.

    Attributes:
        factor_workers: ranks whose batches the factors average over.
        a_inverse_workers: ranks that compute A's second-order data; several if each computes it for itself.
        g_inverse_workers: the same for G.
        gradient_workers: ranks that precondition the layer's gradient: one column of the grid.
    """

    factor_workers: Ranks
    a_inverse_workers: Ranks
    g_inverse_workers: Ranks
    gradient_workers: Ranks


@dataclass(frozen=True)
class Placement:
    """A checked decision for every layer.

    Attributes:
        world_size: number of ranks.
        grad_workers: gradient workers per layer, `m`; divides `world_size`.
        layers: placement by layer name, in the order of the model.

    Raises:
        PlacementError: a layer violates an invariant, which is a bug in the strategy.
    """

    world_size: int
    grad_workers: int
    layers: Mapping[str, LayerPlacement]

    def __post_init__(self) -> None:
        """Check the invariants that the collectives rely on."""
        object.__setattr__(self, "layers", MappingProxyType(dict(self.layers)))
        if self.world_size < 1 or self.grad_workers < 1 or self.world_size % self.grad_workers:
            raise PlacementError(
                f"{self.grad_workers} gradient workers do not divide a world of {self.world_size}"
            )
        columns = {self.column(index): index for index in range(self.columns)}
        for name, layer in self.layers.items():
            if layer.gradient_workers not in columns:
                raise PlacementError(
                    f"layer {name}: gradient workers {layer.gradient_workers} must be a column of the grid"
                )
            for inverse_workers in (layer.a_inverse_workers, layer.g_inverse_workers):
                if not inverse_workers or not set(inverse_workers) <= set(layer.gradient_workers):
                    raise PlacementError(
                        f"layer {name}: inverse workers {inverse_workers} are not among its gradient workers"
                    )
            if not layer.factor_workers or not 0 <= layer.factor_workers[0] <= layer.factor_workers[-1] < (
                self.world_size
            ):
                raise PlacementError(
                    f"layer {name}: factor workers {layer.factor_workers} lie outside the world"
                )

    @property
    def columns(self) -> int:
        """Number of gradient-worker groups, `n`; also the length of a row."""
        return self.world_size // self.grad_workers

    def column(self, index: int) -> Ranks:
        """Gradient-worker group `index`: ranks `index, index + n, ...`."""
        return tuple(range(index, self.world_size, self.columns))

    @property
    def groups(self) -> list[Ranks]:
        """All columns, then all rows, that have several ranks but not all."""
        columns = [self.column(index) for index in range(self.columns)]
        rows = [self.row(index) for index in range(self.grad_workers)]
        return [ranks for ranks in columns + rows if 1 < len(ranks) < self.world_size]

    def row(self, index: int) -> Ranks:
        """Receiver group `index`: ranks `index * n` to `(index + 1) * n - 1`."""
        return tuple(range(index * self.columns, (index + 1) * self.columns))

    def factor_jobs(self, shapes: Sequence[LayerShape]) -> list[FactorJob]:
        """Every factor of every layer, A before G, in the order of `shapes`."""
        jobs = []
        for index, shape in enumerate(shapes):
            layer = self.layers[shape.name]
            sources, users = layer.factor_workers, layer.gradient_workers
            jobs.append(FactorJob(index, "a", shape.a, sources, layer.a_inverse_workers, users))
            jobs.append(FactorJob(index, "g", shape.g, sources, layer.g_inverse_workers, users))
        return jobs

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy by value, as a mapping proxy cannot be pickled."""
        return Placement, (self.world_size, self.grad_workers, dict(self.layers))

    def __str__(self) -> str:
        """The grid of the KAISA paper: one line per row of ranks, then one per layer."""
        width = len(str(self.world_size - 1)) + 1
        lines = [f"{self.grad_workers} x {self.columns} ranks: columns precondition, rows receive"]
        rows = [self.row(index) for index in range(min(self.grad_workers, _ROWS_SHOWN))]
        lines += ["".join(f"{rank:{width}}" for rank in row[:_RANKS_SHOWN]) for row in rows]
        if self.grad_workers > _ROWS_SHOWN or self.columns > _RANKS_SHOWN:
            lines.append("(and so on)")
        for name, layer in self.layers.items():
            lines.append(
                f"{name}: column {layer.gradient_workers[0]}, factors from {_brief(layer.factor_workers)}, "
                f"A inverse on {_brief(layer.a_inverse_workers)}, "
                f"G inverse on {_brief(layer.g_inverse_workers)}"
            )
        return "\n".join(lines)


def _brief(ranks: Iterable[int]) -> str:
    listed = list(ranks)
    return f"{listed[0]}" if len(listed) == 1 else f"{listed[0]}..{listed[-1]} ({len(listed)})"


# ------------------------------------------------------------
# Which layers are worked on together: those of one shape on the same ranks (no torch).


def layer_groups(shapes: Sequence[LayerShape], placement: Placement) -> list[list[int]]:
    """Layers by gradient workers, then by shape, then by inverse workers; groups in column order.

    Layers whose factors have the same inverse workers are adjacent within their group, and so is their
    second-order data, which is ordered by its owner.
    """
    numbers: dict[Any, int] = {}
    groups: dict[tuple[int, int], list[int]] = {}
    for index, shape in enumerate(shapes):
        number = numbers.setdefault((shape.a, shape.g), len(numbers))
        column = placement.layers[shape.name].gradient_workers[0]
        groups.setdefault((column, number), []).append(index)

    def inverse_workers(index: int) -> Any:
        layer = placement.layers[shapes[index].name]
        return layer.a_inverse_workers, layer.g_inverse_workers, index

    return [sorted(groups[key], key=inverse_workers) for key in sorted(groups)]


def in_group_order(
    jobs: Sequence[FactorJob], shapes: Sequence[LayerShape], placement: Placement
) -> list[FactorJob]:
    """Factors by the group of their layer, in a group all A before all G, and then by place in the group."""
    groups = layer_groups(shapes, placement)
    place = {layer: (number, at) for number, group in enumerate(groups) for at, layer in enumerate(group)}
    return sorted(jobs, key=lambda job: (place[job.layer][0], job.kind, place[job.layer][1]))


# ------------------------------------------------------------
# Bytes of K-FAC state that a rank holds, and FLOPs of preconditioning: arithmetic on shapes (no torch).


def state_bytes(
    placement: Placement, shapes: Sequence[LayerShape], config: KFACConfig, rank: int, item_bytes: int = 4
) -> dict[str, int]:
    """Bytes by kind on `rank`; see `KFAC.memory`.

    `item_bytes` is that of the working precision, which `factor_dtype` and `inverse_dtype` override.
    """
    factor_bytes = ITEM_BYTES[config.factor_dtype] if config.factor_dtype else item_bytes
    inverse_bytes = ITEM_BYTES[config.inverse_dtype] if config.inverse_dtype else item_bytes
    jobs = placement.factor_jobs(shapes)
    return {
        "factors": factor_bytes * sum(job.shape.elements for job in jobs if rank in job.inverse_workers),
        "second_order": inverse_bytes
        * sum(data_elements(config, job.shape) for job in jobs if rank in job.gradient_workers),
        "gradients": 2 * item_bytes * sum(shape.gradient_elements for shape in shapes),
        "statistics": item_bytes
        * sum(
            job.shape.elements if rank in job.unpacked_on else job.shape.packed_elements
            for job in jobs
            if rank in job.factor_workers
        ),
    }


def precondition_flops(config: KFACConfig, layer: LayerShape) -> int:
    """FLOPs of one layer's products: two with inverses, four into the eigenbases and back."""
    changes_of_basis = 2 if config.solver == "eigen" else 1
    kept = kept_columns(config, layer.a) + kept_columns(config, layer.g)
    return 2 * changes_of_basis * layer.gradient_elements * kept


def data_elements(config: KFACConfig, factor: FactorShape) -> int:
    """Elements of second-order data: eigenvectors and eigenvalues, or an inverse."""
    kept = kept_columns(config, factor)
    if config.solver != "eigen":
        return factor.elements
    return factor.blocks * (kept * factor.dim + kept + (kept < factor.dim))  # and the mean of those left out


def kept_columns(config: KFACConfig, factor: FactorShape) -> int:
    """Columns of a factor's second-order data: its dimension, or fewer under `eigen_rank`."""
    return factor.dim if config.eigen_rank is None else min(factor.dim, config.eigen_rank)


def data_layout(config: KFACConfig) -> str:
    """What second-order data means; saved data of another layout has to be solved anew."""
    if config.relative_damping is not None and config.solver != "eigen":
        return f"{config.solver}, relative damping"
    return config.solver if config.eigen_rank is None else f"{config.solver} of rank {config.eigen_rank}"
