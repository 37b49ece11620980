"""One form for settings that mean the same, so that they have one id: explicit defaults become None."""

from __future__ import annotations

from dataclasses import replace

from harness.cell import Cell
from kfac_core.config import KFACConfig


def canonical(cell: Cell) -> Cell:
    """The cell with None for each value that None stands for.

    Stored cells are not rewritten: they keep the text and the id that they were stored with.
    """
    implied = cell.training.model_copy(update={"window_steps": None})
    plain = cell.model_copy(update={"training": implied})
    if cell.training.window_steps == plain.window_steps:
        cell = plain
    if cell.kfac is not None:
        cell = cell.model_copy(update={"kfac": _canonical(cell.kfac)})
    return cell


def _canonical(config: KFACConfig) -> KFACConfig:
    changes: dict[str, None] = {}
    if config.assignment == replace(config, assignment=None).placed_by:
        changes["assignment"] = None
    if config.split_factors == "always":
        changes["split_factors"] = None
    # The harness's models are float32, also under autocast, so this is the widest type of any layer.
    factors = config.factor_dtype or "float32"
    if config.factor_dtype == "float32":
        changes["factor_dtype"] = None
    if config.inverse_dtype == factors:
        changes["inverse_dtype"] = None
    return replace(config, **changes) if changes else config  # type: ignore[arg-type]  # None in all of them
