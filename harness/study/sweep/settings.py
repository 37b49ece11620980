"""Settings of a method or a cell: the nested form of a file's values, each with its place in the file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from harness.cell import Cell, Optimizer, Target, Training, Workload
from harness.workloads import WORKLOADS
from harness.yaml_files.document import Document, Place, described
from harness.yaml_files.validation_messages import not_allowed
from kfac_core.config import PAPERS, KFACConfig


class Setting(NamedTuple):
    """Value of one field, as the file has it, and its place there."""

    value: Any
    place: Place


Settings = dict[str, "Setting | Settings"]
"""As a cell is nested: `{"world_size": Setting, "kfac": {"damping": Setting}}`. A list or a schedule is one
setting; only sections and a workload's options are mappings."""

_MODELS: Mapping[str, Any] = {
    "workload": Workload, "target": Target, "training": Training, "optimizer": Optimizer, "kfac": KFACConfig,
}  # fmt: skip
SECTIONS: Mapping[str, tuple[str, ...]] = {
    section: tuple(field.name for field in dataclasses.fields(model))
    if dataclasses.is_dataclass(model)
    else tuple(model.model_fields)
    for section, model in _MODELS.items()
}
SHARED = (*SECTIONS, "world_size")
"""Sections and fields that a method may set; values at the top of the file are shared by all methods."""

OPTION = "workload.options."
"""Paths of workloads' options begin with it; each workload has its own, see its description."""


def read_settings(
    document: Document, place: Place, mapping: Mapping[str, Any], allowed: tuple[str, ...] = SHARED
) -> Settings:
    """The settings of a mapping, whose keys may be nested or dotted.

    Args:
        document: the file, for errors.
        place: place of the mapping in the file.
        mapping: its values.
        allowed: sections and fields at its top level.

    Raises:
        SweepError: an unknown key, a section that is not a mapping, or a field given twice.
    """
    settings: Settings = {}
    for key, value in mapping.items():
        insert(document, settings, (*place, key), key, value, allowed)
    return settings


def insert(
    document: Document,
    settings: Settings,
    place: Place,
    path: str,
    value: Any,
    allowed: tuple[str, ...] = SHARED,
) -> None:
    """Put into `settings` what is written at `place` and sets the field or the section `path`.

    Raises:
        SweepError: as `read_settings`.
    """
    section, _, field = path.partition(".")
    if section not in allowed:
        raise document.error(place, f" is not a field here{not_allowed(section, allowed)}")
    if path == "workload" and isinstance(value, str):
        path, field = "workload.name", "name"
    *above, name = path.split(".", 2)
    if path == "workload.options" or (section in SECTIONS and not field):
        if not isinstance(value, dict):
            raise document.error(place, f" must be a mapping, got {described(value)}")
        settings.setdefault(section, {})  # `kfac: {}` is a section, too
        if path == "kfac" and "paper" in value:
            value = _papers_settings(document, (*place, "paper"), value["paper"]) | value
            del value["paper"]
        for key, below in value.items():
            insert(document, settings, (*place, key), f"{path}.{key}", below, allowed)
        return
    if section not in SECTIONS and field:
        raise document.error(place, f": {section} has no fields of its own")
    if section in SECTIONS and field not in SECTIONS[section] and not path.startswith(OPTION):
        known = not_allowed(field, SECTIONS[section])
        raise document.error(place, f" is not a field of {section}{known}")
    inside = settings
    for part in above:
        inside = inside.setdefault(part, {})  # type: ignore[assignment]  # sections are mappings
    if name in inside:
        raise document.error(place, f" sets {path} a second time; give it once")
    inside[name] = Setting(value, place)


def _papers_settings(document: Document, place: Place, paper: object) -> dict[str, Any]:
    if not isinstance(paper, str) or paper not in PAPERS:
        raise document.error(place, f"={paper!r} is not one of {', '.join(PAPERS)}")
    return dict(PAPERS[paper])


def merged(*layers: Settings) -> Settings:
    """The settings of all layers; a later one takes precedence, field by field."""
    result: Settings = {}
    for layer in layers:
        for key, value in layer.items():
            below = result.get(key)
            both = isinstance(below, dict) and isinstance(value, dict)
            result[key] = merged(below, value) if both else value  # type: ignore[arg-type]
    return result


def without(settings: Settings, paths: Iterable[str]) -> Settings:
    """The settings but those at `paths`; sections stay, even if nothing is left in them."""
    kept = merged({}, settings)
    for path in paths:
        section, _, rest = path.partition(".")
        below = kept[section]
        if isinstance(below, dict):
            kept[section] = without(below, [rest])
        else:
            del kept[section]
    return kept


def values_of(settings: Settings) -> dict[str, Any]:
    """The values alone, as a cell is validated from them."""
    return {
        key: values_of(below) if isinstance(below, dict) else below.value for key, below in settings.items()
    }


def each(settings: Settings, above: str = "") -> Iterator[tuple[str, Setting]]:
    """Every setting with its dotted path."""
    for key, below in settings.items():
        if isinstance(below, dict):
            yield from each(below, f"{above}{key}.")
        else:
            yield f"{above}{key}", below


def place_of(settings: Settings, path: Iterable[str | int], owner: Place, document: Document) -> Place:
    """Where a field is written; else the place of its section, in the method at `owner` or above."""
    parts = tuple(path)
    inside: Any = settings
    for index, part in enumerate(parts, start=1):
        inside = inside.get(part)
        if isinstance(inside, Setting):
            return (*inside.place, *parts[index:])
        if not isinstance(inside, dict):
            break
    return (*owner, *parts) if (*owner, *parts[:1]) in document.lines else parts


def refuse_repeats(document: Document, place: Place, values: Iterable[Any]) -> None:
    """Check that no value of a list is there twice.

    Raises:
        SweepError: one is.
    """
    seen: dict[str, int] = {}
    for index, value in enumerate(values):
        first = seen.setdefault(json.dumps(value, sort_keys=True), index)
        if first != index:
            raise document.error((*place, index), f"={value!r} repeats item {first} of the list")


def known_paths() -> list[str]:
    """Dotted paths of a cell's fields, without the options of workloads, which their descriptions name."""
    paths = [f"{section}.{field}" for section, fields in SECTIONS.items() for field in fields]
    return ["method", "world_size", "seed", "trial", *paths]


def value_of(cell: Cell, path: str) -> Any:
    """Value of a cell at a dotted path; None if it is absent."""
    section, _, field = path.partition(".")
    value = getattr(cell, section)
    if not field or value is None:
        return value
    return value.options.get(path.removeprefix(OPTION)) if path.startswith(OPTION) else getattr(value, field)


def default_of(path: str, workload: str) -> Any:
    """Value of a field that a file does not set, as a file would have it; `...` if it has no default."""
    section, _, field = path.partition(".")
    if path.startswith(OPTION):
        card = WORKLOADS.get(workload)
        return ... if card is None else card.options.get(path.removeprefix(OPTION), ...)
    if not field:
        return ...
    model = _MODELS[section]
    default = getattr(model, field) if section == "kfac" else model.model_fields[field].get_default()
    return list(default) if isinstance(default, tuple) else default


def scalar_types(path: str, workloads: set[str]) -> set[type]:
    """Which of `bool`, `int`, `float`, `str` and `NoneType` a field may hold; of lists and mappings none.

    Args:
        path: a known path, or an option of a workload.
        workloads: names of the workloads whose options count.
    """
    if path.startswith(OPTION):
        name = path.removeprefix(OPTION)
        cards = [WORKLOADS[workload] for workload in workloads]
        return {type(card.options[name]) for card in cards if name in card.options}
    section, _, field = path.partition(".")
    hints = get_type_hints(_MODELS[section] if field else Cell)
    return set(_scalars(hints[field or section]))


def _scalars(annotation: Any) -> list[type]:
    if annotation in (bool, int, float, str, type(None)):
        return [annotation]
    if get_origin(annotation) is Literal:
        return [type(value) for value in get_args(annotation)]
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return [kind for part in get_args(annotation) for kind in _scalars(part)]
    return []
