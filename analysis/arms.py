"""Which runs may be compared with which: arms and settings, from what differs between the cells.

An **arm** is a set of runs that differ in world size and seed only. A **setting** is what a comparison holds
fixed: workload, target and training. Both carry names that spell out only what varies in this study, so an
ordinary sweep shows its methods' names, and a grid over damping shows `comm_opt damping=0.01`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.cell import Cell

SETTING_FIELDS = ("workload", "target", "training")
ARM_FIELDS = ("optimizer", "kfac")


def name_arms(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """(arm, setting) of every cell; the setting is empty where the study has only one."""
    settings = [_flat(cell.model_dump(mode="json", include=set(SETTING_FIELDS))) for cell in cells]
    differing = _varying(settings)
    setting_names = [_spell(setting, differing) for setting in settings]

    own = [_flat(cell.model_dump(mode="json", include=set(ARM_FIELDS))) for cell in cells]
    by_method: dict[str, list[dict[str, Any]]] = {}
    for cell, fields in zip(cells, own, strict=True):
        by_method.setdefault(cell.method, []).append(fields)
    varying = {method: _varying(fields) for method, fields in by_method.items()}

    named = []
    for cell, fields, setting in zip(cells, own, setting_names, strict=True):
        arm = " ".join(filter(None, (cell.method, _spell(fields, varying[cell.method]), setting)))
        named.append((arm, setting))
    return named


def _flat(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{path}."))
        else:
            flat[path] = tuple(value) if isinstance(value, list) else value
    return flat


def _varying(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for row in rows for key in row)
    return [key for key in keys if len({row.get(key) for row in rows}) > 1]


def _spell(fields: Mapping[str, Any], keys: Sequence[str]) -> str:
    words = []
    for key in keys:
        value = fields.get(key)
        if value is not None:
            words.append(str(value) if key == "workload.name" else f"{key.rpartition('.')[2]}={value}")
    return " ".join(words)
