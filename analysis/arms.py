"""Which runs may be compared with which: arms and settings, from what differs between the cells.

An **arm** is a set of runs that differ in world size and seed only. A **setting** is what a comparison holds
fixed: workload, target and training. Both carry names that spell out only what varies in this study, so an
ordinary sweep shows its methods' names, and a grid over damping shows `comm_opt damping=0.01`.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from harness.cell import Cell

Fields = Mapping[str, Any]
"""A cell by dotted paths: `kfac.damping`, `training.global_batch_size`."""

SETTING_SECTIONS = ("workload", "target", "training")
ARM_SECTIONS = ("optimizer", "kfac")
_LONGEST_VALUE = 40  # characters of a value in a name


def fields_of(cell: Cell) -> dict[str, Any]:
    """What decides a cell's numbers, flat; sections that it lacks are left out."""
    return _flat(cell.model_dump(mode="json", exclude={"sweep"}))


def name_arms(rows: Sequence[Fields], without: Collection[str] = ()) -> list[tuple[str, str]]:
    """(arm, setting) of every cell; the setting is empty where the study has only one.

    Args:
        rows: `fields_of` every cell.
        without: fields that a figure puts on an axis. Cells that differ in these only belong together, and in
            what walks along with them too, such as a rate that grows with the batch.
    """
    axis = [tuple(str(row.get(field)) for field in without) for row in rows]
    settings = [_sections(row, SETTING_SECTIONS, without) for row in rows]
    differing = _varying(settings, axis)
    setting_names = [_spell(setting, differing) for setting in settings]

    own = [_sections(row, ARM_SECTIONS, without) for row in rows]
    by_method: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        by_method.setdefault(row["method"], []).append(place)
    varying = {
        method: _varying([own[place] for place in places], [axis[place] for place in places])
        for method, places in by_method.items()
    }
    named = []
    for row, fields, setting in zip(rows, own, setting_names, strict=True):
        arm = " ".join(filter(None, (row["method"], _spell(fields, varying[row["method"]]), setting)))
        named.append((arm, setting))
    return named


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
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{path}."))
        elif value is not None:
            flat[path] = _frozen(value)
    return flat


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _varying(rows: Sequence[Fields], axis: Sequence[tuple[str, ...]]) -> list[str]:
    """Keys with several values, leaving out those whose value the axis decides."""
    keys = dict.fromkeys(key for row in rows for key in row)
    several = [key for key in keys if len({row.get(key) for row in rows}) > 1]
    return [key for key in several if not any(axis) or _spread_within(rows, axis, key)]


def _spread_within(rows: Sequence[Fields], axis: Sequence[tuple[str, ...]], key: str) -> bool:
    values: dict[tuple[str, ...], set[Any]] = {}
    for row, place in zip(rows, axis, strict=True):
        values.setdefault(place, set()).add(row.get(key))
    return any(len(found) > 1 for found in values.values())


def _spell(fields: Fields, keys: Sequence[str]) -> str:
    words = []
    for key in keys:
        value = fields.get(key)
        if value is not None:
            name = key.rpartition(".")[2]
            words.append(str(value) if key == "workload.name" else f"{name}={_brief(value)}")
    return " ".join(words)


def _brief(value: Any) -> str:
    """A value in a name: of a long table its beginning, and a checksum that tells it from others."""
    text = str(value)
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[: _LONGEST_VALUE - 11]}...{zlib.crc32(text.encode()):08x}"
