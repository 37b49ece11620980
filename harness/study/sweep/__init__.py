"""Reads a sweep file and expands it to cells; an error is one line that names the file and the line.

`jobs/sweeps/demo.yaml` documents the format. A method's fields override the shared ones, and `--set`
overrides both. A point of the grid overrides these; `--set` of a field of an axis is an error, because it
would have no effect.

A value goes one way: `yaml_files.document` reads it with its line, `content` checks the file's keys,
`settings` nests it as a cell is nested, `axes` and `tuning` combine settings, `cells` validates the whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from harness.cell import Cell
from harness.errors import SweepError
from harness.shipped import find
from harness.study.sweep.axes import Axis, Exclusions, Method, own_settings, points, read_axes, read_methods
from harness.study.sweep.cells import CellReader
from harness.study.sweep.content import DEFAULT_REPEATS, MAX_CELLS, SweepContent, TuningContent
from harness.study.sweep.settings import (
    OPTION,
    SHARED,
    Settings,
    insert,
    known_paths,
    merged,
    scalar_types,
    value_of,
    values_of,
)
from harness.study.sweep.tuning import read_trials
from harness.yaml_files.document import Document, read_document, read_value
from harness.yaml_files.validation_messages import explain

__all__ = [
    "DEFAULT_REPEATS", "OPTION", "SHARED", "Settings", "Sweep", "SweepContent", "TuningContent",
    "known_paths", "merged", "own_settings", "read_sweep", "scalar_types", "value_of", "values_of",
]  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """A sweep file and its cells, in the order of the file.

    Attributes:
        document: the file, with the lines of its values.
        content: what it says, overrides left out.
        trials: if the sweep tunes, the settings of every method's trials, by the method's name.
    """

    path: Path
    document: Document
    content: SweepContent
    cells: list[Cell]
    trials: Mapping[str, Sequence[Settings]]

    @property
    def name(self) -> str:
        """Name of the study."""
        return self.content.sweep

    @property
    def about(self) -> str:
        """The study's question."""
        return self.content.about


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
    settings, seeds = _read_overrides(document, overrides)
    if seeds:
        kept = {key: value for key, value in document.content.items() if key not in ("repeats", "seeds")}
        document = replace(document, content={**kept, **seeds})
    try:
        content = SweepContent.model_validate_json(json.dumps(document.content), strict=True)
    except ValidationError as error:
        (first, *rest), sentence = explain(error, SweepContent)
        raise document.error((f"--set {first}" if first in seeds else first, *rest), sentence) from None
    methods = read_methods(document, content, settings)
    axes = read_axes(document, content, methods, settings)
    trials = {} if content.tuning is None else read_trials(document, content.tuning, methods, axes, settings)
    cells = _expand(document, content, methods, axes, trials)
    return Sweep(path, document, content, cells, trials)


def _expand(
    document: Document,
    content: SweepContent,
    methods: Sequence[Method],
    axes: Sequence[Axis],
    trials: Mapping[str, Sequence[Settings]],
) -> list[Cell]:
    seeds = content.all_seeds
    per_point = content.tuning.trials if content.tuning else 1
    requested = len(methods) * math.prod(map(len, axes)) * len(seeds) * per_point
    if requested > MAX_CELLS:
        raise document.error(("grid",), f" expands to {requested:,} cells; at most {MAX_CELLS:,} are allowed")
    reader, exclusions = CellReader(document), Exclusions(document, content, methods)
    cells: dict[str, Cell] = {}
    for method in methods:
        for point in points(axes, method):
            for trial, tuned in enumerate(trials.get(method.name, [{}]), start=1):
                settings = merged(method.settings, point, tuned)
                if not (kept := exclusions.kept(method, settings, seeds)):
                    continue
                cell, merges = reader.cell(method, settings, trial if trials else None)
                for seed in kept:
                    seeded = cell.model_copy(update={"seed": seed})
                    other = cells.setdefault(seeded.content_hash, seeded)
                    if other is not seeded and not (merges and other.method == seeded.method):
                        same = f"cell {seeded.id} computes the same as cell {other.id}"
                        raise document.error(method.place, f": {same}; remove one")
    exclusions.check_used()
    reader.check_used()
    if not cells:
        raise document.error((), "no cell is left: exclude and the method axes drop all cells")
    return list(cells.values())


def _read_overrides(document: Document, overrides: Sequence[str]) -> tuple[Settings, dict[str, Any]]:
    """Settings for all methods, and `repeats` or `seeds`."""
    settings: Settings = {}
    seeds: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        flag = f"--set {key}"
        if not equals or not key:
            raise document.error((f"--set {override}",), ": write field=value, such as training.epochs=5")
        if not text.strip():
            raise document.error((flag,), "= has no value; write null for no value, and '' for empty text")
        value = read_value(text, flag, SweepError)
        if key not in ("repeats", "seeds"):
            insert(document, settings, (flag,), key, value)
        elif seeds:
            raise document.error((flag,), f" and --set {next(iter(seeds))} are both given; use one")
        else:
            seeds[key] = value
    return settings, seeds
