"""Writes the sweep of a study from the sweep that tuned its methods, each with its best trial's setting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from harness.errors import SweepError
from harness.study.sweep import SECTIONS, SHARED, Sweep, flatten
from harness.yaml_files.document import Document, read_document

_KEPT = ("workload", "target", "training", "optimizer", "kfac", "world_size")
Nested = dict[str, Any]


def study_text(sweep: Sweep, best: Mapping[str, int]) -> str:
    """The study's sweep file.

    Args:
        sweep: the sweep with the trials.
        best: number of the chosen trial of every method that the study is to have.

    Raises:
        SweepError: the sweep has no trials, or the study's section is not of this choice.
    """
    if sweep.tuning is None:
        raise SweepError(f"{sweep.path}: has no `tuning`, so there is nothing to choose from")
    document = read_document(sweep.path, SweepError)
    study = sweep.tuning.study
    content: Nested = {"sweep": study["sweep"]}
    if about := study.get("about", sweep.about):
        content["about"] = about
    content |= {key: document.content[key] for key in _KEPT if key in document.content}
    content["methods"] = _methods(document, sweep, best)
    if grid := study.get("grid", document.content.get("grid")):
        content["grid"] = grid
        for path in grid:
            content.pop(path, None)  # an axis takes the place of the shared value
    content["seeds"] = study["seeds"]
    content["tuned"] = {
        "sweep": sweep.name, "trials": sweep.tuning.trials, "seeds": list(sweep.tuning.seeds),
    }  # fmt: skip
    head = (
        f"# Written by `kronscale choose` from {sweep.path.name}: of {sweep.tuning.trials} trials of each "
        "method the best, by median time to the target.\n"
        "# Written before any run of the study; the trials are kept beside this file.\n"
    )
    return head + _dumped(content)


def _methods(document: Document, sweep: Sweep, best: Mapping[str, int]) -> list[Nested]:
    assert sweep.tuning is not None  # noqa: S101  checked by the caller
    chosen: dict[str, dict[str, Any]] = {}
    kfac: set[str] = set()
    for index, entry in enumerate(document.content["methods"]):
        name = entry["name"]
        if name in best:
            own = {key: value for key, value in entry.items() if key != "name"}
            fields = flatten(document, ("methods", index), own, SHARED)
            fields |= sweep.tuning.points[name][best[name] - 1]
            chosen[name] = {path: leaf.value for path, leaf in fields.items()}
            if any(key.partition(".")[0] == "kfac" for key in own):
                kfac.add(name)
    methods = [_entry(name, fields, name in kfac) for name, fields in chosen.items()]
    for index, entry in enumerate(sweep.tuning.study.get("also", [])):
        if entry["like"] in chosen:
            own = {key: value for key, value in entry.items() if key not in ("name", "like")}
            fields = flatten(document, ("tuning", "study", "also", index), own, SHARED)
            like = chosen[entry["like"]]
            merged = like | {path: leaf.value for path, leaf in fields.items()}
            methods.append(_entry(entry["name"], merged, entry["like"] in kfac))
    return methods


def _entry(name: str, fields: Mapping[str, Any], has_kfac: bool) -> Nested:
    """A method as its file has it, from values by dotted path."""
    entry: Nested = {"name": name}
    if has_kfac:
        entry["kfac"] = {}
    for path, value in fields.items():
        section, _, field = path.partition(".")
        if section not in SECTIONS:
            entry[path] = value
        elif field.startswith("options."):
            options = entry.setdefault(section, {}).setdefault("options", {})
            options[field.removeprefix("options.")] = value
        else:
            entry.setdefault(section, {})[field] = value
    return entry


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
