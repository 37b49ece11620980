"""What a sweep would ask for, before anything is asked: states, worlds and placements of its cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from harness.cell import Cell
from harness.runs.store import sweep_folder
from kfac_core.config import KFACConfig
from kfac_core.placement import FactorShape, LayerShape
from kfac_core.placement.strategies import STRATEGIES, place

Standing = Literal["done", "failed", "pending", "new"]
STANDINGS: tuple[Standing, ...] = ("done", "failed", "pending", "new")

_ANY_LAYER = LayerShape(
    "any", FactorShape(1), FactorShape(1)
)  # the group's size does not depend on the layer


@dataclass(frozen=True)
class PlanSummary:
    """A summary of cells.

    Attributes:
        cells: the cells that it is about, in the order of their file.
        standing: by cell id: `done` once the latest attempt has completed, `failed` if it ended otherwise,
            `pending` while it has no outcome, `new` where there is no attempt.
    """

    cells: Sequence[Cell]
    standing: Mapping[str, Standing]

    @property
    def counts(self) -> dict[Standing, int]:
        """Cells by standing, all four named."""
        found = Counter(self.standing.values())
        return {standing: found[standing] for standing in STANDINGS}

    @property
    def total_ranks(self) -> int:
        """Ranks of all cells together."""
        return sum(cell.world_size for cell in self.cells)

    @property
    def largest_world(self) -> int:
        """The largest world size."""
        return max(cell.world_size for cell in self.cells)

    @property
    def world_sizes(self) -> list[int]:
        """Distinct world sizes, ascending."""
        return sorted({cell.world_size for cell in self.cells})

    def grid(self) -> dict[str, dict[int, int]]:
        """Number of cells by method, then by world size; methods in the order of the file."""
        grid: dict[str, Counter[int]] = {}
        for cell in self.cells:
            grid.setdefault(cell.method, Counter())[cell.world_size] += 1
        return {method: dict(row) for method, row in grid.items()}

    def placements(self) -> dict[str, str]:
        """For each method, in words, who computes what."""
        words: dict[str, dict[str, None]] = {}
        worlds: dict[str, dict[KFACConfig | None, set[int]]] = {}
        for cell in self.cells:
            worlds.setdefault(cell.method, {}).setdefault(cell.kfac, set()).add(cell.world_size)
        for method, configs in worlds.items():
            for config, sizes in configs.items():
                words.setdefault(method, {})[placement_in_words(config, sorted(sizes))] = None
        return {method: " / ".join(sentences) for method, sentences in words.items()}

    def to_json(self) -> dict[str, Any]:
        """The plan_summary as plain values, one entry per cell."""
        cells = [
            {
                "id": cell.id,
                "method": cell.method,
                "world_size": cell.world_size,
                "seed": cell.seed,
                "global_batch_size": cell.training.batch_sizes(cell.world_size)[0],
                "local_batch_size": cell.training.batch_sizes(cell.world_size)[1],
                "standing": self.standing[cell.id],
            }
            for cell in self.cells
        ]
        return {
            "counts": self.counts,
            "total_ranks": self.total_ranks,
            "largest_world": self.largest_world,
            "placements": self.placements(),
            "cells": cells,
        }


def plan_summary(cells: Sequence[Cell], runs: Path) -> PlanSummary:
    """Look at what is stored of `cells`; writes nothing."""
    return PlanSummary(cells, {cell.id: standing for cell, standing in _standings(cells, runs)})


def placement_in_words(config: KFACConfig | None, world_sizes: Iterable[int]) -> str:
    """What a strategy says of itself, with its gradient workers per layer on each world size."""
    if config is None:
        return "no K-FAC"
    says = (STRATEGIES[config.strategy].__doc__ or config.strategy).splitlines()[0].rstrip(".")
    groups = ", ".join(f"{place(config, [_ANY_LAYER], size).grad_workers} of {size}" for size in world_sizes)
    return f"{says}; gradient workers per layer: {groups}"


def _standings(cells: Sequence[Cell], runs: Path) -> Iterable[tuple[Cell, Standing]]:
    for name in dict.fromkeys(cell.sweep for cell in cells):
        folder = sweep_folder(name, runs)
        # One listing in place of a look for each cell: a sweep of thousands may not have begun.
        stored = {path.name for path in folder.path.iterdir()} if folder.path.is_dir() else set()
        for cell in (cell for cell in cells if cell.sweep == name):
            attempt = folder.cell_folder(cell).latest() if cell.id in stored else None
            outcome = attempt.outcome() if attempt else None
            if attempt is None:
                yield cell, "new"
            elif outcome is None:
                yield cell, "pending"
            else:
                yield cell, "done" if outcome.state == "COMPLETED" else "failed"
