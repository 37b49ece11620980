"""Makes a cell from settings: validated once by its models, then held against the rules of its fields.

The rules are `Cell.unread`, `Cell.conflicts` and those of the workload's description.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from harness.cell import Cell
from harness.errors import UserError
from harness.study.sweep.axes import Method
from harness.study.sweep.settings import Settings, each, place_of, values_of, without
from harness.workloads import WORKLOADS
from harness.yaml_files.document import Document, Place
from harness.yaml_files.validation_messages import explain, field_and_rest, not_allowed


class CellReader:
    """Reads the cells of one sweep file."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._read: set[str] = set()
        self._left_out: dict[str, tuple[Place, str]] = {}

    def cell(self, method: Method, settings: Settings, trial: int | None) -> tuple[Cell, bool]:
        """The cell of these settings, with seed 0.

        Shared fields and axes that the method does not read are left out, and must be read by another.

        Returns:
            The cell, and whether an axis was left out, so that another point may give the same cell.

        Raises:
            SweepError: a setting is missing, invalid, read by nothing, or in conflict with another one.
        """
        cell = self._validated(method, settings, trial)
        unread = dict([*cell.unread(), *WORKLOADS[cell.workload.name].unread(cell)])
        idle = {path: setting for path, setting in each(settings) if path in unread}
        self._read.update(path for path, _ in each(settings) if path not in idle)
        for path, (value, place) in idle.items():
            sentence = f" has no effect {unread[path]}"
            if value in (None, False, 0, "", []):  # off, which is true of what is not read
                self._read.add(path)
            elif place[0] in ("methods", "tuning"):  # written for this method alone
                raise self._document.error(place, f"{sentence}; remove it (method {method.name})")
            else:
                self._left_out.setdefault(path, (place, sentence))
        if idle:
            settings = without(settings, idle)
            cell = self._validated(method, settings, trial)
        for path, sentence in (*cell.conflicts(), *WORKLOADS[cell.workload.name].conflicts(cell)):
            raise self._error(method, settings, path.split("."), sentence, which=path != "method")
        return canonical(cell), any(setting.place[0] in ("grid", "zip") for setting in idle.values())

    def check_used(self) -> None:
        """Check that every shared field and every axis was read by some method.

        Raises:
            SweepError: one was not.
        """
        for path, (place, sentence) in self._left_out.items():
            if path not in self._read:
                raise self._document.error(place, f"{sentence}, and no other method reads it; remove it")

    def _validated(self, method: Method, settings: Settings, trial: int | None) -> Cell:
        values = {"sweep": self._document.content["sweep"], "trial": trial, **values_of(settings)}
        if not method.has_kfac:
            values.pop("kfac", None)
        workload = values.get("workload", {})
        name = workload.get("name")
        if isinstance(name, str) and name not in WORKLOADS:
            known = f"={name!r} is not a workload{not_allowed(name, WORKLOADS)}"
            raise self._error(method, settings, ("workload", "name"), known, which=False)
        try:
            if isinstance(name, str):
                workload["options"] = WORKLOADS[name].completed(workload.get("options", {}))
            # JSON instead of Python mode: strict about numbers and text, but a list may become a tuple
            return Cell.model_validate_json(json.dumps(values), strict=True)
        except ValidationError as error:
            path, sentence = explain(error)
            whole = not error.errors()[0]["loc"] or path[0] not in values  # about more than one value
        except ValueError as error:  # of the workload
            inside, sentence = field_and_rest(str(error))
            path, whole = ("workload", *inside), False
        raise self._error(method, settings, path, sentence, which=whole)

    def _error(
        self, method: Method, settings: Settings, path: Sequence[str | int], sentence: str, *, which: bool
    ) -> UserError:
        """An error about a field; `which` adds the cell, and its workload where the sweep has several."""
        if which:
            written = dict(each(settings))
            size, workload = written.get("world_size"), written.get("workload.name")
            sentence += f" (method {method.name}"
            sentence += f", world_size={size.value}" if size else ""
            varies = workload is not None and workload.place[0] in ("grid", "zip")
            sentence += f", workload {workload.value})" if workload and varies else ")"
        place = place_of(settings, path, method.place, self._document)
        return self._document.error(place, sentence)


def canonical(cell: Cell) -> Cell:
    """The cell with None instead of each value that None is resolved to: what computes the same has one id.

    Stored cells are not rewritten: they keep the text and the id that they were stored with.
    """
    training, kfac = cell.training, cell.kfac
    if training.factor_micro_batches == training.accumulate:
        training = training.model_copy(update={"factor_micro_batches": None})
    if training.window_steps is not None:
        implied = training.model_copy(update={"window_steps": None})
        if cell.model_copy(update={"training": implied}).window_steps == training.window_steps:
            training = implied
    if kfac is not None:
        stands_for = {
            "assignment": kfac.assignment and replace(kfac, assignment=None).placed_by,
            "split_factors": "always",
            # The harness's models are float32, also under autocast, so this is the widest type of any layer.
            "factor_dtype": "float32",
            "inverse_dtype": kfac.factor_dtype or "float32",
        }
        none: dict[str, Any] = {
            field: None for field, value in stands_for.items() if value and getattr(kfac, field) == value
        }
        kfac = replace(kfac, **none) if none else kfac
    return cell.model_copy(update={"training": training, "kfac": kfac})
