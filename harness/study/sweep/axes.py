"""`grid` and `zip`: the axes of a sweep."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from harness.study.sweep.fields import SHARED, Fields, leaves
from harness.study.sweep.methods import Method, named_method
from harness.yaml_files.document import Document, Place, described

Axis = list[Fields]
"""Points of one axis, in file order: values of one field of the grid, or of the fields of one zip entry."""

_AXIS_FIELDS = ("method", *SHARED)


def read_axes(document: Document, methods: Sequence[Method]) -> list[Axis]:
    """All axes of the file, `grid` before `zip`.

    Raises:
        SweepError: an unknown field, an empty or repeated list, or zipped lists of unequal length.
    """
    axes: list[Axis] = []
    for key, values in _mapping(document, ("grid",), document.content.get("grid", {})).items():
        points = [dict(point) for point in _points(document, ("grid", key), key, values)]
        _refuse_repeats(document, ("grid", key), values)
        axes.append(points)
    for index, entry in enumerate(_list(document, ("zip",))):
        axes.append(_zipped(document, ("zip", index), entry))
    _refuse_shared_fields(document, axes)
    for point in (point for axis in axes for point in axis):
        if "method" in point:
            named_method(document, point["method"], methods)
    return axes


def combinations(axes: Sequence[Axis], method: Method) -> Iterator[Fields]:
    """Every combination of points for `method`.

    For a method without K-FAC, points that differ only in `kfac.*` are merged.
    """
    for chosen in product(*(_points_for(method, axis) for axis in axes)):
        yield _merged(chosen)


def count(axes: Sequence[Axis]) -> int:
    """Number of combinations, before points are merged."""
    return math.prod(len(axis) for axis in axes)


def _points_for(method: Method, axis: Axis) -> Axis:
    points = [point for point in axis if "method" not in point or point["method"].value == method.name]
    if method.has_kfac or not any(path.startswith("kfac.") for point in points for path in point):
        return points
    distinct: dict[str, Fields] = {}
    for point in points:
        own = {path: leaf for path, leaf in point.items() if not path.startswith("kfac.")}
        distinct.setdefault(json.dumps({path: leaf.value for path, leaf in own.items()}), own)
    return list(distinct.values())


def _points(document: Document, place: Place, key: str, values: Any) -> Iterator[Fields]:
    if not isinstance(values, list) or not values:
        got = "an empty list" if values == [] else described(values)
        raise document.error(place, f" must be a list of values such as [1, 2, 4], got {got}")
    if key == "seed":
        raise document.error(
            place, " is not an axis; write `seeds: [...]` or `repeats: n` at the top of the file"
        )
    for index, value in enumerate(values):
        yield dict(leaves(document, (*place, index), key, value, _AXIS_FIELDS))


def _zipped(document: Document, place: Place, entry: Any) -> Axis:
    columns = {key: list(_points(document, (*place, key), key, values))
               for key, values in _mapping(document, place, entry).items()}  # fmt: skip
    lengths = {key: len(points) for key, points in columns.items()}
    if not columns:
        raise document.error(place, " is an empty mapping; name the fields that vary together")
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise document.error(place, f" has lists of unequal length: {found}")
    return [_merged(points) for points in zip(*columns.values(), strict=True)]


def _merged(points: Sequence[Fields]) -> Fields:
    merged: Fields = {}
    for point in points:
        merged.update(point)
    return merged


def _refuse_repeats(document: Document, place: Place, values: list[Any]) -> None:
    seen: dict[str, int] = {}
    for index, value in enumerate(values):
        first = seen.setdefault(json.dumps(value, sort_keys=True), index)
        if first != index:
            raise document.error((*place, index), f"={value!r} repeats item {first} of the list")


def _refuse_shared_fields(document: Document, axes: Sequence[Axis]) -> None:
    owner: dict[str, int] = {}
    for index, axis in enumerate(axes):
        for path, leaf in ((path, leaf) for point in axis for path, leaf in point.items()):
            if owner.setdefault(path, index) != index:
                raise document.error(leaf.place, f" varies {path}, which another axis varies already")


def _mapping(document: Document, place: Place, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise document.error(place, f" must be a mapping of fields to lists, got {described(value)}")
    return value


def _list(document: Document, place: Place) -> list[Any]:
    value = document.content.get(place[0], [])
    if not isinstance(value, list):
        example = "such as [{world_size: [1, 2], optimizer.lr: [0.1, 0.2]}]"
        raise document.error(place, f" must be a list of mappings, {example}, got {described(value)}")
    return value
