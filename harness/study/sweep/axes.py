"""Methods, axes and exclusions: what a sweep file combines to settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from harness.study.sweep.content import Axes, MethodContent, SweepContent
from harness.study.sweep.settings import (
    SHARED,
    Setting,
    Settings,
    default_of,
    each,
    insert,
    merged,
    read_settings,
    refuse_repeats,
)
from harness.yaml_files.document import Document, Place
from harness.yaml_files.validation_messages import not_allowed

Axis = list[Settings]
"""Points of one axis, in file order: values of one field of the grid, or of the fields of one zip entry."""


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        settings: shared, own and command-line settings, merged. Those of `kfac` are there even if the method
            has no such section; its cells leave them out.
    """

    name: str
    place: Place
    settings: Settings
    has_kfac: bool


def read_methods(document: Document, content: SweepContent, overrides: Settings) -> list[Method]:
    """The methods in file order.

    Raises:
        SweepError: an unknown field, or one given twice.
    """
    top = {key: getattr(content, key) for key in SHARED if key in content.model_fields_set}
    shared = read_settings(document, (), top)
    methods = []
    for index, entry in enumerate(content.methods):
        place = ("methods", index)
        own = own_settings(document, place, entry)
        named: Settings = {"method": Setting(entry.name, (*place, "name"))}
        methods.append(Method(entry.name, place, merged(named, shared, own, overrides), "kfac" in own))
    return methods


def own_settings(document: Document, place: Place, entry: MethodContent) -> Settings:
    """The settings that a method does not share.

    Raises:
        SweepError: an unknown field, or one given twice.
    """
    return read_settings(document, place, entry.model_extra or {})


def read_axes(
    document: Document, content: SweepContent, methods: Sequence[Method], overrides: Settings
) -> list[Axis]:
    """All axes of the file, `grid` before `zip`.

    Raises:
        SweepError: an unknown field or method, a repeated value, zipped lists of unequal length, or a field
            that another axis or `--set` fixes.
    """
    axes = [_axis(document, ("grid",), {key: values}) for key, values in content.grid.items()]
    axes += [_axis(document, ("zip", index), entry) for index, entry in enumerate(content.zip)]
    for key, values in content.grid.items():
        refuse_repeats(document, ("grid", key), values)
    set_here = dict(each(overrides))
    owner: dict[str, int] = {}
    for index, axis in enumerate(axes):
        for path, setting in (item for point in axis for item in each(point)):
            if owner.setdefault(path, index) != index:
                raise document.error(setting.place, f" varies {path}, which another axis varies already")
            if path in set_here:
                sentence = f" is an axis of the file; {path} cannot also be --set"
                raise document.error(setting.place, sentence)
            if path == "method":
                _check_method(document, setting, methods)
    return axes


def points(axes: Sequence[Axis], method: Method) -> Iterator[Settings]:
    """Every combination of the axes' points for a method."""
    for chosen in product(*(_points_of(method, axis) for axis in axes)):
        yield merged(*chosen)


class Exclusions:
    """The entries of `exclude`; each must match at least one cell.

    Raises:
        SweepError: an entry has an unknown field or method.
    """

    def __init__(self, document: Document, content: SweepContent, methods: Sequence[Method]) -> None:
        self._document = document
        self._entries: dict[Place, dict[str, Any]] = {}
        self._used: set[Place] = set()
        for index, entry in enumerate(content.exclude):
            place = ("exclude", index)
            settings = read_settings(document, place, entry, ("method", "seed", *SHARED))
            if isinstance(named := settings.get("method"), Setting):
                _check_method(document, named, methods)
            self._entries[place] = {path: value for path, (value, _) in each(settings)}

    def kept(self, method: Method, settings: Settings, seeds: Sequence[int]) -> Sequence[int]:
        """The seeds of which no entry drops the cell."""
        written = {path: value for path, (value, _) in each(settings)} if self._entries else {}
        kept = set(seeds)
        for place, wanted in self._entries.items():
            rest = {path: value for path, value in wanted.items() if path != "seed"}
            if all(_has(method, written, path, value) for path, value in rest.items()):
                dropped = {seed for seed in seeds if _same(seed, wanted.get("seed", seed))}
                if dropped:
                    self._used.add(place)
                kept -= dropped
        return [seed for seed in seeds if seed in kept]

    def check_used(self) -> None:
        """Check that every entry dropped a cell.

        Raises:
            SweepError: one did not.
        """
        for place, wanted in self._entries.items():
            if place not in self._used:
                listed = ", ".join(f"{path}={value}" for path, value in wanted.items())
                raise self._document.error(place, f" matches no cell: {listed}")


def _axis(document: Document, place: Place, columns: Axes) -> Axis:
    lengths = {key: len(values) for key, values in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise document.error(place, f" has lists of unequal length: {listed}")
    axis: Axis = [{} for _ in range(max(lengths.values()))]
    for key, values in columns.items():
        for index, (point, value) in enumerate(zip(axis, values, strict=True)):
            insert(document, point, (*place, key, index), key, value, ("method", *SHARED))
    return axis


def _points_of(method: Method, axis: Axis) -> Axis:
    own = []
    for point in axis:
        named = point.get("method")
        if not isinstance(named, Setting) or named.value == method.name:
            own.append(point)
    if not method.has_kfac and all(list(point) == ["kfac"] for point in own):
        return own[:1]  # the others would only repeat its cells
    return own


def _check_method(document: Document, setting: Setting, methods: Sequence[Method]) -> None:
    names = [method.name for method in methods]
    if setting.value not in names:
        known = not_allowed(str(setting.value), names)
        raise document.error(setting.place, f"={setting.value!r} is not a method{known}")


def _has(method: Method, written: dict[str, Any], path: str, wanted: Any) -> bool:
    if path.startswith("kfac.") and not method.has_kfac:  # null is a value that a section may hold
        return False
    value = written[path] if path in written else default_of(path, str(written.get("workload.name")))
    return _same(value, wanted)


def _same(value: Any, wanted: Any) -> bool:
    """Whether they are equal; true is no 1."""
    return isinstance(value, bool) == isinstance(wanted, bool) and bool(value == wanted)
