"""Fields that a sweep may set, by dotted path, and the conversion of nested mappings to such paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.cell import Optimizer, Target, Training
from harness.yaml_files.document import Document, Place, described
from harness.yaml_files.validation_messages import not_allowed
from kfac_core.config import KFACConfig


@dataclass(frozen=True)
class Leaf:
    """Value of one field and its place in the file."""

    value: Any
    place: Place


Fields = dict[str, Leaf]
"""Values by dotted path: `kfac.damping`."""

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "workload": ("name", "options"),
    "target": tuple(Target.model_fields),
    "training": tuple(Training.model_fields),
    "optimizer": tuple(Optimizer.model_fields),
    "kfac": tuple(field.name for field in dataclasses.fields(KFACConfig)),
}
SHARED = (*SECTIONS, "world_size")
"""Sections and fields that a method may set; values at the top of the file are shared by all methods."""


def known_paths() -> list[str]:
    """Every dotted path of a cell; options of a workload are `workload.options.<name>`."""
    paths = [f"{section}.{field}" for section, fields in SECTIONS.items() for field in fields]
    return ["method", "world_size", "seed", "trial", *paths]


def value_of(thing: Any, path: str) -> Any:
    """Value of a cell or a draft at a dotted path; None if it is absent."""
    section, _, field = path.partition(".")
    value = getattr(thing, section)
    if not field or value is None:
        return value
    if field.startswith("options."):
        return value.options.get(field.removeprefix("options."))
    return getattr(value, field)


def flatten(document: Document, place: Place, mapping: Any, allowed: tuple[str, ...]) -> Fields:
    """Values of a nested mapping by dotted path; keys may be dotted paths, too.

    Args:
        document: the file, for errors.
        place: place of the mapping in the file.
        mapping: nested values.
        allowed: sections and fields at its top level.

    Raises:
        SweepError: an unknown key, a section that is not a mapping, or a field given twice.
    """
    if not isinstance(mapping, dict):
        raise document.error(place, f" must be a mapping, got {described(mapping)}")
    fields: Fields = {}
    for key, value in mapping.items():
        for path, leaf in leaves(document, (*place, key), key, value, allowed):
            if path in fields:
                raise document.error(leaf.place, f" sets {path} a second time")
            fields[path] = leaf
    return fields


def leaves(
    document: Document, place: Place, path: str, value: Any, allowed: tuple[str, ...]
) -> Iterator[tuple[str, Leaf]]:
    """The leaves of `value`, which is written at `place` and sets `path`.

    Raises:
        SweepError: `path` or a key below it is not a field, or a section is not a mapping.
    """
    section, _, field = path.partition(".")
    if section not in allowed:
        raise document.error(place, f" is not a field here{not_allowed(section, allowed)}")
    if section in SECTIONS and not field:
        if section == "workload" and isinstance(value, str):
            yield "workload.name", Leaf(value, place)
            return
        yield from _below(document, place, path, value, allowed)
    elif path == "workload.options":
        yield from _below(document, place, path, value, allowed)
    elif section in SECTIONS and not path.startswith("workload.options."):
        if field not in SECTIONS[section]:
            known = not_allowed(field, SECTIONS[section])
            raise document.error(place, f" is not a field of {section}{known}")
        yield path, Leaf(value, place)
    elif section not in SECTIONS and field:
        raise document.error(place, f": {section} has no fields of its own")
    else:
        yield path, Leaf(value, place)


def _below(
    document: Document, place: Place, path: str, value: Any, allowed: tuple[str, ...]
) -> Iterator[tuple[str, Leaf]]:
    if not isinstance(value, dict):
        raise document.error(place, f" must be a mapping, got {described(value)}")
    for key, below in value.items():
        yield from leaves(document, (*place, key), f"{path}.{key}", below, allowed)
