"""One form for settings that mean the same, so that they have one id: explicit defaults become None."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.cell import Cell
from kfac_core.config import KFACConfig


def canonical(cell: Cell) -> Cell:
    """The cell with None for each value that None stands for.

    Stored cells are not rewritten: they keep the text and the id that they were stored with.
    """
    changes: dict[str, Any] = {}
    if cell.training.factor_micro_batches == cell.training.accumulate:
        every = cell.training.model_copy(update={"factor_micro_batches": None})
        cell = cell.model_copy(update={"training": every})
    if cell.training.window_steps is not None:
        implied = cell.training.model_copy(update={"window_steps": None})
        if cell.model_copy(update={"training": implied}).window_steps == cell.training.window_steps:
            changes["training"] = implied
    if cell.kfac is not None and (defaults := _explicit_defaults(cell.kfac)):
        none: dict[str, Any] = dict.fromkeys(defaults)
        changes["kfac"] = replace(cell.kfac, **none)
    return cell.model_copy(update=changes) if changes else cell


def _explicit_defaults(config: KFACConfig) -> list[str]:
    """Fields with the value that None stands for."""
    found = []
    if config.assignment is not None and config.assignment == replace(config, assignment=None).placed_by:
        found.append("assignment")
    if config.split_factors == "always":
        found.append("split_factors")
    # The harness's models are float32, also under autocast, so this is the widest type of any layer.
    if config.factor_dtype == "float32":
        found.append("factor_dtype")
    if config.inverse_dtype == (config.factor_dtype or "float32"):
        found.append("inverse_dtype")
    return found
