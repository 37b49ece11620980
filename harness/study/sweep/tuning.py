"""`tuning`: the search space of each method, from which every method gets the same number of trials.

A trial is a method with values for all fields of its space, drawn quasi-randomly as in AlgoPerf's external
tuning (Dahl et al. 2023, section 4.4). `kronscale choose` writes the study's sweep with the best of each.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from harness.cell import MOST_SEEDS
from harness.study.sweep.axes import Axis, combinations
from harness.study.sweep.fields import SHARED, Fields
from harness.study.sweep.methods import Method
from harness.study.sweep.quasi_random import MOST_DIMENSIONS, sobol
from harness.study.sweep.search_space import Dimension, read_dimension
from harness.study.sweep.seed_lists import read_seeds, refuse_shared_seeds
from harness.yaml_files.document import Document, Place, described
from harness.yaml_files.validation_messages import not_allowed

TUNING_KEYS: Mapping[str, str] = {
    "trials": "Number of trials of every method.",
    "seed": "Of the quasi-random points; default 0. Another seed gives other trials.",
    "shared": "Fields that every method tunes, with their ranges.",
    "space": "By method, the fields that it tunes, with their ranges: `{log: [low, high]}`, "
    "`{linear: [low, high]}`, `{one_minus_log: [low, high]}` (1 - x is drawn as by `log`), or a list of "
    "choices. A choice may be a mapping of several fields of a section.",
    "study": "The sweep that `kronscale choose` writes; see below.",
}
STUDY_KEYS: Mapping[str, str] = {
    "sweep": "Name of the study.",
    "about": "Its question.",
    "seeds": "Its seeds, none of them a seed of the trials.",
    "grid": "Its axes, in the place of the tuning's `grid`.",
    "also": "More methods: each has a `name`, `like` (the tuned method whose best setting it takes) and "
    "sections that override it.",
}
MOST_TRIALS = 1_000
_DRAWS_PER_TRIAL = 200  # before a space of choices counts as exhausted
_NEVER = ("zip", "include", "exclude")


@dataclass(frozen=True)
class Tuning:
    """The trials of a sweep.

    Attributes:
        trials: of each method.
        seeds: of the runs of each trial.
        points: of each method, by its name: the values of its trials, the first one first.
        study: the section `study` of the file, checked.
    """

    trials: int
    seeds: tuple[int, ...]
    points: Mapping[str, Sequence[Fields]]
    study: Mapping[str, Any]


def read_tuning(
    document: Document,
    methods: Sequence[Method],
    axes: Sequence[Axis],
    seeds: Sequence[int],
    overrides: Fields,
) -> Tuning | None:
    """The trials of every method; None if the file does not tune.

    Raises:
        SweepError: a key, a method or a field is unknown, a range or a choice is no search, a method has no
            space, the axes give more than one point, or the study shares a seed with the trials.
    """
    if "tuning" not in document.content:
        return None
    section = _mapping(document, ("tuning",), TUNING_KEYS)
    for key in _NEVER:
        if key in document.content:
            raise document.error((key,), " cannot be combined with `tuning`: trials are all at one point")
    for method in methods:
        if len(list(combinations(axes, method))) > 1:
            raise document.error(
                ("grid",), " has several points, and trials are all at one; write a sweep for each, or "
                "give the study's axes in tuning.study.grid",
            )  # fmt: skip
    trials, seed = (
        _whole(document, section, key, low, high, default)
        for key, low, high, default in (("trials", 2, MOST_TRIALS, None), ("seed", 0, MOST_SEEDS - 1, 0))
    )
    spaces = _spaces(document, methods, section)
    _refuse_fixed_fields(document, spaces, axes, overrides)
    return Tuning(
        trials,
        tuple(seeds),
        {name: _points(document, name, space, trials, seed) for name, space in spaces.items()},
        _study(document, methods, seeds),
    )


def _spaces(
    document: Document, methods: Sequence[Method], section: Mapping[str, Any]
) -> dict[str, list[Dimension]]:
    names = [method.name for method in methods]
    own = section.get("space", {})
    for place, value in ((("tuning", "space"), own), (("tuning", "shared"), section.get("shared", {}))):
        if not isinstance(value, dict):
            raise document.error(place, f" must be a mapping, got {described(value)}")
    for name in own:
        if name not in names:
            raise document.error(("tuning", "space", name), f" is not a method{not_allowed(name, names)}")
    spaces = {}
    for method in methods:
        inside: Place = ("tuning", "space", method.name)
        ranges = own.get(method.name, {})
        if not isinstance(ranges, dict):
            raise document.error(inside, f" must be a mapping of fields to ranges, got {described(ranges)}")
        written = {("tuning", "shared", key): key for key in section.get("shared", {}) if key not in ranges}
        written |= {(*inside, key): key for key in ranges}
        found = [read_dimension(document, where, key, method) for where, key in written.items()]
        if not found:
            raise document.error(
                ("tuning", "space"), f" has no fields for method {method.name}; every method is tuned"
            )
        _refuse_twice(document, found)
        if len(found) > MOST_DIMENSIONS:
            raise document.error(inside, f" has {len(found)} fields; at most {MOST_DIMENSIONS} can be tuned")
        spaces[method.name] = found
    return spaces


def _refuse_twice(document: Document, space: Sequence[Dimension]) -> None:
    seen: dict[str, Dimension] = {}
    for dimension in space:
        for path in dimension.paths:
            if path in seen:
                raise document.error(dimension.place, f" tunes {path}, which another entry tunes already")
            seen[path] = dimension


def _refuse_fixed_fields(
    document: Document, spaces: Mapping[str, Sequence[Dimension]], axes: Sequence[Axis], overrides: Fields
) -> None:
    """A field that an axis or `--set` fixes cannot be tuned: one of the two would have no effect."""
    on_axes = {path for axis in axes for point in axis for path in point}
    for dimension in (dimension for space in spaces.values() for dimension in space):
        for path in dimension.paths:
            if path in on_axes:
                raise document.error(dimension.place, f" tunes {path}, which is an axis of the file")
            if path in overrides:
                raise document.error(dimension.place, f" is tuned; {path} cannot also be --set")


def _points(
    document: Document, method: str, space: Sequence[Dimension], trials: int, seed: int
) -> list[Fields]:
    """The first `trials` different points of the sequence."""
    distinct: dict[str, Fields] = {}
    for point in islice(sobol(len(space), seed), trials * _DRAWS_PER_TRIAL):
        fields: Fields = {}
        for dimension, share in zip(space, point, strict=True):
            fields.update(dimension.at(share))
        distinct.setdefault(json.dumps({path: leaf.value for path, leaf in fields.items()}), fields)
        if len(distinct) == trials:
            return list(distinct.values())
    raise document.error(
        ("tuning", "trials"), f"={trials} is more than the {len(distinct)} settings of method {method}; "
        "give all methods fewer trials, or this one a larger space",
    )  # fmt: skip


def _study(document: Document, methods: Sequence[Method], seeds: Sequence[int]) -> dict[str, Any]:
    place = ("tuning", "study")
    study = _mapping(document, place, STUDY_KEYS)
    for key in ("sweep", "seeds"):
        if key not in study:
            raise document.error((*place, key), " is missing")
    for key, kind, words in (
        ("sweep", str, "text"),
        ("about", str, "text"),
        ("grid", dict, "a mapping of fields to lists"),
    ):
        if key in study and not isinstance(study[key], kind):
            raise document.error((*place, key), f" must be {words}, got {described(study[key])}")
    if study["sweep"] == document.content.get("sweep"):
        raise document.error((*place, "sweep"), f"={study['sweep']!r} is this sweep; give the study another")
    refuse_shared_seeds(
        document, (*place, "seeds"), read_seeds(document, (*place, "seeds"), study["seeds"]), seeds,
        "of the trials",
    )  # fmt: skip
    names = [method.name for method in methods]
    for index, entry in enumerate(_entries(document, (*place, "also"), study.get("also", []))):
        where = (*place, "also", index)
        if not isinstance(entry.get("name"), str):
            got = described(entry.get("name"))
            raise document.error((*where, "name"), f" must be the method's name as text, got {got}")
        for key in entry:
            if key not in ("name", "like", *SHARED):
                raise document.error(
                    (*where, key), f" is not a field here{not_allowed(key, ('name', 'like', *SHARED))}"
                )
        if entry.get("like") not in names:
            known = not_allowed(str(entry.get("like")), names)
            raise document.error((*where, "like"), f"={entry.get('like')!r} is not a tuned method{known}")
    return study


def _entries(document: Document, place: Place, value: Any) -> Iterator[dict[str, Any]]:
    if not isinstance(value, list):
        raise document.error(place, f" must be a list of methods, got {described(value)}")
    for index, entry in enumerate(value):
        if not isinstance(entry, dict):
            raise document.error((*place, index), f" must be a mapping, got {described(entry)}")
        yield entry


def _mapping(document: Document, place: Place, keys: Mapping[str, str]) -> dict[str, Any]:
    value: Any = document.content
    for part in place:
        value = value.get(part)
    if not isinstance(value, dict):
        raise document.error(place, f" must be a mapping with {', '.join(keys)}, got {described(value)}")
    for key in value:
        if key not in keys:
            raise document.error((*place, key), f" is not a key here{not_allowed(key, keys)}")
    return value


def _whole(
    document: Document, section: Mapping[str, Any], key: str, low: int, high: int, default: int | None
) -> int:
    value = section.get(key, default)
    if type(value) is not int or not low <= value <= high:
        raise document.error(
            ("tuning", key), f" must be a whole number from {low} to {high}, got {described(value)}"
        )
    return value


def refuse_seeds_of_the_tuning(document: Document, seeds: Sequence[int]) -> None:
    """Check the section `tuned` that `kronscale choose` writes: no seed of the trials is one of the study.

    Raises:
        SweepError: one is, or the section has another key or value.
    """
    if "tuned" not in document.content:
        return
    section = _mapping(document, ("tuned",), TUNED_KEYS)
    for key, kind in (("sweep", str), ("trials", int)):
        if type(section.get(key)) is not kind:
            words = "text" if kind is str else "a whole number"
            raise document.error(("tuned", key), f" must be {words}, got {described(section.get(key))}")
    of_trials = read_seeds(document, ("tuned", "seeds"), section.get("seeds"))
    refuse_shared_seeds(document, ("seeds",), seeds, of_trials, f"of the trials of {section['sweep']}")


TUNED_KEYS: Mapping[str, str] = {
    "sweep": "Name of the sweep that tuned the methods.",
    "trials": "Trials of each method.",
    "seeds": "Seeds of the trials.",
}
