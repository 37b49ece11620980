"""Writes the sweep of a study from the sweep that tuned its methods, each with its best trial's setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from harness.errors import SweepError
from harness.study.sweep import SHARED, Settings, Sweep, TuningContent, merged, own_settings, values_of

Nested = dict[str, Any]


def study_text(sweep: Sweep, best: Mapping[str, int], at: float | None = None) -> str:
    """The study's sweep file.

    Args:
        sweep: the sweep with the trials.
        best: number of the chosen trial of every method that the study is to have.
        at: value of the target by which trials were chosen, where it is not the sweep's; the study's target.

    Raises:
        SweepError: the sweep has no trials.
    """
    tuning = sweep.content.tuning
    if tuning is None:
        raise SweepError(f"{sweep.path}: has no `tuning`, so there is nothing to choose from")
    study, written = tuning.study, sweep.document.content
    content: Nested = {"sweep": study.sweep}
    if about := study.about or sweep.about:
        content["about"] = about
    content |= {key: written[key] for key in SHARED if key in written}
    if at is not None:
        content["target"] = {
            name: value if name == "metric" else at for name, value in written["target"].items()
        }
    content["methods"] = _methods(sweep, tuning, best)
    if grid := study.grid or sweep.content.grid:
        content["grid"] = {path: list(values) for path, values in grid.items()}
        for path in grid:
            content.pop(path, None)  # an axis takes the place of the shared value
    content["seeds"] = list(study.seeds)
    content["tuned"] = {
        "sweep": sweep.name, "trials": tuning.trials, "seeds": list(sweep.content.all_seeds),
    }  # fmt: skip
    head = (
        f"# Written by `kronscale choose` from {sweep.path.name}: of {tuning.trials} trials of each "
        "method the best, by median time to the target.\n"
        "# Written before any run of the study; the trials are kept beside this file.\n"
    )
    return head + _dumped(content)


def _methods(sweep: Sweep, tuning: TuningContent, best: Mapping[str, int]) -> list[Nested]:
    chosen: dict[str, Settings] = {}
    for index, entry in enumerate(sweep.content.methods):
        if entry.name in best:
            own = own_settings(sweep.document, ("methods", index), entry)
            chosen[entry.name] = merged(own, sweep.trials[entry.name][best[entry.name] - 1])
    methods = dict(chosen)
    for index, entry in enumerate(tuning.study.also):
        if entry.like in chosen:
            own = own_settings(sweep.document, ("tuning", "study", "also", index), entry)
            methods[entry.name] = merged(chosen[entry.like], own)
    return [{"name": name, **values_of(settings)} for name, settings in methods.items()]


def _dumped(content: Nested) -> str:
    """YAML with one method a line."""
    text = ""
    for key, value in content.items():
        if key == "methods":
            lines = (
                yaml.safe_dump(one, default_flow_style=True, sort_keys=False, width=10_000) for one in value
            )
            text += "methods:\n" + "".join(f"  - {line}" for line in lines)
        else:
            flow = isinstance(value, dict | list)
            shown = (
                yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000)
                if flow
                else None
            )
            text += f"{key}: {shown}" if shown else yaml.safe_dump({key: value}, width=10_000)
    return text
