"""Types of a cell's fields by dotted path: a selection compares with values of the field's own type."""

from __future__ import annotations

import json
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from harness.cell import Cell, Optimizer, Target, Training, Workload
from harness.study.sweep.fields import Leaf
from harness.workloads import WORKLOADS
from harness.yaml_files.document import Document, described
from harness.yaml_files.validation_messages import explain
from kfac_core.config import KFACConfig

OPTION = "workload.options."
"""Paths of workloads' options begin with it; each workload has its own, see its card."""

_MODELS: dict[str, Any] = {
    "workload": Workload, "target": Target, "training": Training, "optimizer": Optimizer, "kfac": KFACConfig,
}  # fmt: skip
_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


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
    return set(_scalars(_annotation(path)))


def typed(document: Document, path: str, leaf: Leaf) -> Any:
    """The value of `leaf` as a cell holds it: a list as a tuple, a schedule as `Milestones`.

    Raises:
        SweepError: it is not of the field's type.
    """
    try:
        return _adapter(path).validate_json(json.dumps(leaf.value), strict=True)
    except ValidationError as error:
        _, sentence = explain(error)
        raise document.error(leaf.place, sentence) from None


def typed_option(document: Document, default: Any, leaf: Leaf) -> Any:
    """The value of `leaf` as an option whose default is `default` holds it.

    Raises:
        SweepError: it is of another type than the default.
    """
    if isinstance(default, float) and type(leaf.value) is int:
        return float(leaf.value)
    if type(leaf.value) is not type(default):
        kind = _KINDS[type(default)]
        raise document.error(
            leaf.place, f" must be {kind}, got {described(leaf.value)} (default {default!r})"
        )
    return leaf.value


@cache
def _adapter(path: str) -> TypeAdapter[Any]:
    return TypeAdapter(_annotation(path))


def _annotation(path: str) -> Any:
    section, _, field = path.partition(".")
    if not field:
        return Cell.model_fields[section].annotation
    if section == "kfac":  # a dataclass of a library that knows no pydantic
        return get_type_hints(KFACConfig)[field]
    return _MODELS[section].model_fields[field].annotation


def _scalars(annotation: Any) -> list[type]:
    if annotation in (bool, int, float, str, type(None)):
        return [annotation]
    if get_origin(annotation) is Literal:
        return [type(value) for value in get_args(annotation)]
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return [kind for part in get_args(annotation) for kind in _scalars(part)]
    return []
