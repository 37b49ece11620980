"""Reads a sweep file and expands it to cells; an error is one line that names the file and the line.

`jobs/sweeps/demo.yaml` documents the format. A method's fields override the shared ones, and `--set`
overrides both. A point of the grid and an include entry override these; `--set` of a field that one of them
sets is an error, because it would have no effect there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cell import Cell
from harness.errors import SweepError
from harness.shipped import find
from harness.study.sweep.axes import Axis, combinations, count, read_axes
from harness.study.sweep.build import Builder, Draft
from harness.study.sweep.field_types import OPTION, scalar_types
from harness.study.sweep.fields import SECTIONS, SHARED, Fields, flatten, known_paths, leaves, value_of
from harness.study.sweep.keys import KEYS
from harness.study.sweep.methods import Method, read_methods
from harness.study.sweep.seed_lists import read_seeds
from harness.study.sweep.selection import Exclusions, read_exclusions, read_inclusions
from harness.study.sweep.tuning import (
    STUDY_KEYS,
    TUNED_KEYS,
    TUNING_KEYS,
    Tuning,
    read_tuning,
    refuse_seeds_of_the_tuning,
)
from harness.yaml_files.document import Document, described, read_document, read_value
from harness.yaml_files.validation_messages import not_allowed

__all__ = [
    "DEFAULT_REPEATS", "KEYS", "MAX_CELLS", "OPTION", "SECTIONS", "SHARED", "STUDY_KEYS", "TUNED_KEYS",
    "TUNING_KEYS", "Sweep", "Tuning", "flatten", "known_paths", "read_sweep", "scalar_types", "value_of",
]  # fmt: skip

DEFAULT_REPEATS = 6  # the smallest number of runs with a 95 % interval of the median
MAX_CELLS = 100_000  # a larger number is a mistake in the grid


@dataclass(frozen=True)
class Sweep:
    """A sweep file and its cells, in the order of the file; `tuning` if its cells are trials."""

    name: str
    about: str
    path: Path
    cells: list[Cell]
    tuning: Tuning | None = None


def read_sweep(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Read a sweep file.

    Args:
        path: the file; a shipped one of that path where there is none, such as `jobs/sweeps/demo.yaml`.
        overrides: such as `training.epochs=5`, values as in YAML; they take precedence over methods.

    Raises:
        SweepError: the first mistake in the file or in the overrides.
    """
    path = find(path)
    document = read_document(path, SweepError)
    for key in document.content:
        if key not in KEYS:
            raise document.error((key,), f" is not a key of a sweep file{not_allowed(key, KEYS)}")
    if "sweep" not in document.content:
        raise document.error(("sweep",), " is missing: the name of the study")
    about = document.content.get("about", "")
    if not isinstance(about, str):
        raise document.error(("about",), f" must be text, got {described(about)}")
    fields, top = _read_overrides(document, overrides)
    methods = read_methods(document, fields)
    axes = read_axes(document, methods)
    _refuse_overridden_axes(document, axes, fields)
    seeds = _seeds(document, top)
    refuse_seeds_of_the_tuning(document, seeds)
    tuning = read_tuning(document, methods, axes, seeds, fields)
    cells = _expand(document, methods, axes, seeds, fields, tuning)
    return Sweep(cells[0].sweep, about, path, cells, tuning)


def _expand(
    document: Document,
    methods: Sequence[Method],
    axes: Sequence[Axis],
    seeds: Sequence[int],
    overrides: Fields,
    tuning: Tuning | None,
) -> list[Cell]:
    requested = len(methods) * count(axes) * len(seeds) * (tuning.trials if tuning else 1)
    if requested > MAX_CELLS:
        raise document.error(("grid",), f" expands to {requested:,} cells; at most {MAX_CELLS:,} are allowed")
    builder = Builder(document)
    exclusions = read_exclusions(document, methods)
    cells: dict[str, Cell] = {}
    for draft in _drafts(builder, methods, axes, seeds, exclusions, tuning):
        _add(document, cells, builder.cell(draft), draft)
    exclusions.check_used()
    for method, place, fields in read_inclusions(document, methods, overrides):
        draft = builder.draft(place, {**method.fields, **fields}, method.has_kfac)
        for seed in [fields["seed"].value] if "seed" in fields else seeds:
            _add(document, cells, builder.cell(draft.with_seed(seed)), draft)
    builder.check_used()
    if not cells:
        raise document.error((), "no cell is left: exclude and the method axes drop all cells")
    return list(cells.values())


def _drafts(
    builder: Builder,
    methods: Sequence[Method],
    axes: Sequence[Axis],
    seeds: Sequence[int],
    exclusions: Exclusions,
    tuning: Tuning | None,
) -> Iterator[Draft]:
    for method in methods:
        for point in combinations(axes, method):
            fields = {**method.fields, **point}
            for draft in _settings(builder, method, fields, tuning):
                for seed in seeds:
                    seeded = draft.with_seed(seed)
                    if not exclusions.match(seeded):
                        yield seeded


def _settings(builder: Builder, method: Method, fields: Fields, tuning: Tuning | None) -> Iterator[Draft]:
    """The setting of a method at a point of the axes, or those of its trials."""
    if tuning is None:
        yield builder.draft(method.place, fields, method.has_kfac)
        return
    for trial, tuned in enumerate(tuning.points[method.name], start=1):
        yield builder.draft(method.place, {**fields, **tuned}, method.has_kfac).with_trial(trial)


def _add(document: Document, cells: dict[str, Cell], cell: Cell, draft: Draft) -> None:
    other = cells.setdefault(cell.content_hash, cell)
    if other is not cell and not (draft.merges and other.method == cell.method):
        raise document.error(
            draft.owner, f": cell {cell.id} computes the same as cell {other.id}; remove one"
        )


def _read_overrides(document: Document, overrides: Sequence[str]) -> tuple[Fields, dict[str, Any]]:
    fields: Fields = {}
    seeds: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        flag = f"--set {key}"
        if not equals or not key:
            raise document.error((f"--set {override}",), ": write field=value, such as training.epochs=5")
        if not text.strip():
            raise document.error((flag,), "= has no value; write null for no value, and '' for empty text")
        value = read_value(text, flag, SweepError)
        if key in ("repeats", "seeds"):
            if seeds:
                raise document.error((flag,), f" and --set {next(iter(seeds))} are both given; use one")
            seeds[key] = value
            continue
        for path, leaf in leaves(document, (flag,), key, value, SHARED):
            if path in fields:
                raise document.error((flag,), f" sets {path} a second time; give it once")
            fields[path] = leaf
    top = seeds or {key: document.content[key] for key in ("repeats", "seeds") if key in document.content}
    return fields, top


def _refuse_overridden_axes(document: Document, axes: Sequence[Axis], overrides: Fields) -> None:
    for point in (point for axis in axes for point in axis):
        for path in point.keys() & overrides.keys():
            raise document.error(point[path].place, f" is an axis of the file; {path} cannot also be --set")


def _seeds(document: Document, top: dict[str, Any]) -> list[int]:
    if len(top) > 1:
        raise document.error(
            ("seeds",), " and repeats are both given; use one: repeats: n means seeds 0 to n - 1"
        )
    if "seeds" in top:
        return read_seeds(document, ("seeds",), top["seeds"])
    if "tuning" in document.content:
        raise document.error(
            ("seeds",), " is missing: a sweep that tunes lists them, and its study has none of them"
        )
    repeats = top.get("repeats", DEFAULT_REPEATS)
    if type(repeats) is not int or not 1 <= repeats <= MAX_CELLS:
        raise document.error(("repeats",), f" must be a whole number from 1 to {MAX_CELLS}, got {repeats!r}")
    return list(range(repeats))
