"""Names of arms and settings, made from the fields in which the cells of a study differ.

An **arm** is a set of runs that differ in world size and seed only. A **setting** is what a comparison holds
fixed: workload, target and training, but not the length and the regularisation if each method has its own.
Both names contain only the fields that vary in this study: an ordinary sweep shows its methods' names, and a
grid over damping shows `comm_opt damping=0.01`.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from harness.cell import Cell
from kfac_core.schedule import Curve, Decay, Milestones

Fields = Mapping[str, Any]
"""A cell by dotted paths: `kfac.damping`, `training.global_batch_size`; a schedule is one value, its text."""

SETTING_SECTIONS = ("workload", "target", "training")
ARM_SECTIONS = ("optimizer", "kfac")
OF_ARMS = ("training.factor_micro_batches",)
"""What of a setting's section is the arm's: it says what K-FAC computes."""
OF_METHODS = (
    "training.epochs", "training.kfac_start_epoch",
    *(f"workload.options.{name}" for name in ("label_smoothing", "dropout", "augment")),
)  # fmt: skip
"""Not held fixed if each method has its own value: SC20 trains SGD for 90 epochs and K-FAC for 55."""
OF_WORLDS = ("training.accumulate",)
"""Not held fixed if each world size has its own value: fewer ranks need more micro-batches of one size."""
_SCHEDULES = {
    frozenset(field.name for field in dataclasses.fields(kind)): kind for kind in (Milestones, Curve, Decay)
}
_LONGEST_VALUE = 40  # characters of a value in a name


def fields_of(cell: Cell) -> dict[str, Any]:
    """The cell's fields by dotted path, without its sweep and without sections that it does not have."""
    return _flat(cell.model_dump(mode="json", exclude={"sweep"}))  # no trial, no key: it would be null


def differences(cells: Sequence[Cell]) -> dict[str, str]:
    """By cell id, the fields that vary, such as `damping=0.03`; without what an id shows anyway."""
    names = name_arms([fields_of(cell) for cell in cells])
    return {
        cell.id: arm.removeprefix(cell.method).strip() for cell, (arm, _) in zip(cells, names, strict=True)
    }


def name_arms(rows: Sequence[Fields], without: Collection[str] = ()) -> list[tuple[str, str]]:
    """(arm, setting) of every cell; the setting is empty if the study has only one.

    Args:
        rows: `fields_of` every cell.
        without: fields that a figure shows on an axis. Cells that differ only in these, and in fields that
            they determine (such as a learning rate that grows with the batch), are one arm.
    """
    axis = [tuple(str(row.get(field)) for field in without) for row in rows]
    chosen = [row for row in rows if "trial" not in row]  # a trial's fields are its own
    without = {
        *without,
        *(field for field in OF_METHODS if _each_has_one(chosen, "method", field)),
        *(field for field in OF_WORLDS if _each_has_one(rows, "world_size", field)),
    }
    settings = [_sections(row, SETTING_SECTIONS, {*without, *OF_ARMS}) for row in rows]
    differing = _beyond_the_workload(rows, settings, _varying(settings, axis))
    setting_names = [_name(setting, differing) for setting in settings]

    own = [
        _sections(row, ARM_SECTIONS, without) | {path: row[path] for path in OF_ARMS if path in row}
        for row in rows
    ]
    by_method: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        by_method.setdefault(row["method"], []).append(index)
    varying = {
        method: _varying([own[index] for index in indices], [axis[index] for index in indices])
        for method, indices in by_method.items()
    }
    named = []
    for row, fields, setting in zip(rows, own, setting_names, strict=True):
        if "trial" in row:  # many fields differ, and the table of trials has them all
            named.append((f"{row['method']} trial={row['trial']}", ""))
            continue
        arm = " ".join(filter(None, (row["method"], _name(fields, varying[row["method"]]), setting)))
        named.append((arm, setting))
    return named


def _each_has_one(rows: Sequence[Fields], owner: str, field: str) -> bool:
    """Whether all rows with the same `owner` have the same value."""
    values: dict[Any, set[Any]] = {}
    for row in rows:
        values.setdefault(row[owner], set()).add(row.get(field))
    return all(len(found) == 1 for found in values.values())


def _beyond_the_workload(
    rows: Sequence[Fields], settings: Sequence[Fields], keys: Sequence[str]
) -> list[str]:
    """`workload.name`, and keys that vary within a workload; its name says the others.

    Else a study of two workloads would name every option of both, as none has the other's options.
    """
    if "workload.name" not in keys:
        return list(keys)
    values: dict[tuple[str, str], set[Any]] = {}
    for row, setting in zip(rows, settings, strict=True):
        for key in keys:
            values.setdefault((key, row["workload.name"]), set()).add(setting.get(key))
    several = {key for (key, _), found in values.items() if len(found) > 1}
    return [key for key in keys if key == "workload.name" or key in several]


def _sections(row: Fields, sections: Sequence[str], without: Collection[str]) -> dict[str, Any]:
    return {
        path: value
        for path, value in row.items()
        if path.partition(".")[0] in sections and path not in without
    }


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        path = f"{prefix}{key}"
        kind = _SCHEDULES.get(frozenset(value)) if isinstance(value, Mapping) else None
        if kind is not None:  # one value, which changes over time
            flat[path] = str(kind(**value))
        elif isinstance(value, Mapping):
            flat.update(_flat(value, f"{path}."))
        elif value is not None:
            flat[path] = _hashable(value)
    return flat


def _hashable(value: Any) -> Any:
    return tuple(_hashable(item) for item in value) if isinstance(value, list) else value


def _varying(rows: Sequence[Fields], axis: Sequence[tuple[str, ...]]) -> list[str]:
    """Keys with several values, without those whose value the axis determines."""
    keys = dict.fromkeys(key for row in rows for key in row)
    several = [key for key in keys if len({row.get(key) for row in rows}) > 1]
    return [key for key in several if not any(axis) or _varies_at_a_point(rows, axis, key)]


def _varies_at_a_point(rows: Sequence[Fields], axis: Sequence[tuple[str, ...]], key: str) -> bool:
    values: dict[tuple[str, ...], set[Any]] = {}
    for row, point in zip(rows, axis, strict=True):
        values.setdefault(point, set()).add(row.get(key))
    return any(len(found) > 1 for found in values.values())


def _name(fields: Fields, keys: Sequence[str]) -> str:
    parts = []
    for key in keys:
        value = fields.get(key)
        if value is not None:
            name = key.rpartition(".")[2]
            parts.append(str(value) if key == "workload.name" else f"{name}={_shortened(value)}")
    return " ".join(parts)


def _shortened(value: Any) -> str:
    """A value in a name; a long table is cut and gets a checksum that tells it from others."""
    text = str(value)
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[: _LONGEST_VALUE - 11]}...{zlib.crc32(text.encode()):08x}"
