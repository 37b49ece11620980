"""References of sweep files and site profiles, made from the models that read them.

A field's docstring is its meaning, with `Range: ...` where its type does not say it, and at its end
`Example: ...`, a YAML value.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from harness.cell import Optimizer, Target, Training, Workload
from harness.launchers.site_profile import Site
from harness.launchers.slurm_profile import SlurmProfile
from harness.study.sweep.content import (
    LikeContent,
    MethodContent,
    StudyContent,
    SweepContent,
    TunedContent,
    TuningContent,
)
from harness.workloads import WORKLOADS
from harness.workloads.description import MOST
from kfac_core.config import Costs, KFACConfig
from kfac_core.schedule import Curve, Decay, Milestones

Model = type[Any]

MODELS: dict[str, Model] = {
    "sweep": SweepContent,
    "tuning": TuningContent,
    "study": StudyContent,
    "tuned": TunedContent,
    "workload": Workload,
    "target": Target,
    "training": Training,
    "optimizer": Optimizer,
    "kfac": KFACConfig,
    "kfac.costs": Costs,
    "schedule": Milestones,
    "decay": Decay,
    "site": Site,
    "slurm": SlurmProfile,
}
"""Models of the files that users write, by the name of their table in `docs/reference`."""

_UNITS = {
    "_seconds": "s",
    "_minutes": "min",
    "_epochs": "epochs",
    "_epoch": "epochs",
    "_steps": "steps",
    "_batch_size": "examples",
    "_gb_per_node": "GB",
}
_TYPES = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    types.NoneType: "null",
    Milestones: "[schedule](#schedules)",
    Curve: "[curve](#curves)",
    Decay: "[curve](#curves)",
    Costs: "[mapping](#kfaccosts)",
    SlurmProfile: "[mapping](#slurm)",
    MethodContent: "mapping",
    LikeContent: "mapping",
    TuningContent: "[mapping](#tuning)",
    StudyContent: "[mapping](#tuningstudy)",
    TunedContent: "[mapping](#tuned)",
    Any: "any value",
}
_SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


class MissingDescriptionError(ValueError):
    """A field or an option that nothing explains."""


@dataclass(frozen=True)
class FieldRow:
    """One field as the reference shows it.

    Attributes:
        allowed: range, or choices; empty if the type says it all.
        example: a YAML value.
    """

    name: str
    kind: str
    default: str
    allowed: str
    unit: str
    meaning: str
    example: str


def field_table(model: Model) -> str:
    """The fields of a model."""
    lines = ["| field | value | meaning |", "|---|---|---|"]
    for row in rows(model):
        value = ", ".join(part for part in (row.kind, row.allowed, row.unit and f"in {row.unit}") if part)
        cells = [
            f"`{row.name}`",
            f"{value}<br>{row.default}",
            f"{row.meaning}<br>Example: `{row.example}`",
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return _joined(lines)


def option_tables() -> str:
    """Metrics and options of every workload."""
    parts: list[str] = []
    for name, description in WORKLOADS.items():
        metrics = ", ".join(
            f"`{metric}` ({better} is better)" for metric, better in description.metrics.items()
        )
        parts += [f"### `{name}`", "", f"{_capital(description.about)}.", "", f"Metrics: {metrics}.", ""]
        parts += ["| option | default | allowed | meaning |", "|---|---|---|---|"]
        parts += [f"| `{row[0]}` | {' | '.join(row[1:])} |" for row in option_rows(name)]
        parts.append("")
    return _joined(parts)


def option_rows(workload: str) -> Iterator[tuple[str, str, str, str]]:
    """Name, default, choices and meaning of every option of a workload.

    Raises:
        MissingDescriptionError: an option without a meaning.
    """
    description = WORKLOADS[workload]
    for option, default in description.options.items():
        if not description.meanings.get(option):
            raise MissingDescriptionError(
                f"option {option} of workload {workload} has no meaning in its description"
            )
        chosen = ", ".join(f"`{choice}`" for choice in description.choices.get(option, ()))
        most = f", at most {MOST[option]:,}" if option in MOST and isinstance(default, int) else ""
        allowed = chosen or _TYPES[type(default)] + most
        yield option, f"`{_yaml(default)}`", allowed, _capital(description.meanings[option])


def rows(model: Model) -> Iterator[FieldRow]:
    """The fields of a model, a dataclass or a pydantic one.

    Raises:
        MissingDescriptionError: a field without a docstring or an example.
    """
    meanings = _docstrings(model)
    hints = typing.get_type_hints(model)
    for name, default, constraints in _fields(model):
        text = meanings.get(name, "")
        meaning, example = _example(text)
        if not meaning or not example:
            raise MissingDescriptionError(
                f"{model.__module__}.{model.__qualname__}.{name}: write a docstring below the field that "
                "says what it means and ends with `Example: ...`"
            )
        meaning, allowed = _range(meaning)
        allowed = allowed or _choices(hints[name]) or constraints
        unit = next((unit for ending, unit in _UNITS.items() if name.endswith(ending)), "")
        yield FieldRow(name, _kind(hints[name]), default, allowed, unit, meaning, example)


def _fields(model: Model) -> Iterator[tuple[str, str, str]]:
    """Name, default in YAML and range of every field."""
    if dataclasses.is_dataclass(model):
        for field in dataclasses.fields(model):
            required = field.default is dataclasses.MISSING
            yield field.name, _default(required, field.default), ""
        return
    for name, info in model.model_fields.items():
        bounds = [
            f"{sign} {getattr(constraint, key):g}"
            for constraint in info.metadata
            for key, sign in _SIGNS.items()
            if getattr(constraint, key, None) is not None
        ]
        required = info.is_required()
        yield name, _default(required, info.default), " and ".join(bounds)


def _docstrings(model: Model) -> dict[str, str]:
    """The text below each field, in the source of the class."""
    (body,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(model))).body
    assert isinstance(body, ast.ClassDef)  # noqa: S101  the source of a class
    found = {}
    for field, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            value = below.value if isinstance(below, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                found[field.target.id] = " ".join(value.value.split())
    return found


def _example(text: str) -> tuple[str, str]:
    matched = re.search(r"\s*Example: `([^`]+)`\.$", text)
    return (text[: matched.start()], matched[1]) if matched else (text, "")


def _range(text: str) -> tuple[str, str]:
    matched = re.search(r"\s*Range: ([\[(][^])]*[\])])\.", text)
    return (text.replace(matched[0], "", 1), f"`{matched[1]}`") if matched else (text, "")


def _choices(hint: Any) -> str:
    choices = [choice for part in _union(hint) if get_origin(part) is Literal for choice in get_args(part)]
    return ", ".join(f"`{_yaml(choice)}`" for choice in choices)


def _kind(hint: Any) -> str:
    kinds = dict.fromkeys(_single_kind(part) for part in _union(hint))
    return " or ".join(kind for kind in kinds if kind)


def _single_kind(part: Any) -> str:
    origin = get_origin(part)
    if origin is Literal:
        kinds = dict.fromkeys(_TYPES[type(choice)] for choice in get_args(part))
        return " or ".join(kinds)
    if origin is tuple:
        inner = [argument for argument in get_args(part) if argument is not ...]
        names = dict.fromkeys(_single_kind(argument) for argument in inner)
        return f"list of {' and '.join(map(_plural, names))}"
    if origin is dict:
        return "mapping"
    if origin is not None:  # a function of the step: only in code
        return ""
    return _TYPES[part]


def _plural(kind: str) -> str:
    """`numbers`, `text`, `lists of numbers`."""
    if kind.startswith("list "):
        return kind.replace("list", "lists", 1)
    return kind if kind == "text" else f"{kind}s"


def _union(hint: Any) -> tuple[Any, ...]:
    return (
        get_args(hint) if isinstance(hint, types.UnionType) or get_origin(hint) is typing.Union else (hint,)
    )


def _default(required: bool, value: Any) -> str:
    return "required" if required else f"default `{_yaml(value)}`"


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if value == ():
        return "[]"
    return '""' if value == "" else str(value)


def _joined(lines: list[str]) -> str:
    return "\n".join(lines)


def _capital(text: str) -> str:
    return text if text.startswith("`") else text[0].upper() + text[1:]
