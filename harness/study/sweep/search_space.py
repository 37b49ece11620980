"""One dimension of a search space: a range or choices of a field."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from harness.study.sweep.field_types import OPTION, scalar_types
from harness.study.sweep.fields import SHARED, Fields, Leaf, known_paths, leaves
from harness.study.sweep.methods import Method
from harness.yaml_files.document import Document, Place, described, value_at
from harness.yaml_files.validation_messages import did_you_mean, not_allowed

TUNED_TRAINING = tuple(
    f"training.{name}" for name in ("global_batch_size", "local_batch_size", "epochs", "kfac_start_epoch")
)
TUNED_OPTIONS = ("label_smoothing", "dropout", "augment")
"""Of a workload: how it is regularised. Its data, model and target are the task, the same for all methods."""

_DIGITS = 3  # of a drawn number: more would make settings that nobody can read aloud

Transform = Callable[[float], float]
_SCALES: Mapping[str, tuple[Transform, Transform]] = MappingProxyType({
    "log": (math.log, math.exp),
    "linear": (float, float),
    "one_minus_log": (lambda x: -math.log1p(-x), lambda u: -math.expm1(-u)),
})  # fmt: skip
"""Of a range: to the scale on which it is drawn evenly, and back."""


@dataclass(frozen=True)
class Dimension:
    """A field, or several that vary together, with what it may be.

    Attributes:
        paths: the fields' dotted paths.
        place: in the file.
        at: the fields' values at a share of the space, in (0, 1).
    """

    paths: tuple[str, ...]
    place: Place
    at: Callable[[float], Fields]


def read_dimension(document: Document, place: Place, key: str, method: Method) -> Dimension:
    """A dimension of the space of `method`.

    Raises:
        SweepError: the field is unknown, is not a hyperparameter, or not one of this method, or its range or
            choices leave nothing to search.
    """
    value = value_at(document.content, place)
    _check_tunable(document, place, key, method)
    if isinstance(value, list):
        choices = _choices(document, place, key, value)
        paths = tuple(dict.fromkeys(path for choice in choices for path in choice))
        for path in paths:
            _check_tunable(document, place, path, method)
        return Dimension(paths, place, lambda share: choices[int(share * len(choices))])
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in _SCALES:
        got = (
            ", ".join(map(str, value)) or "an empty mapping" if isinstance(value, dict) else described(value)
        )
        raise document.error(
            place, f" must be {{log: [low, high]}}, {{linear: [low, high]}}, {{one_minus_log: [low, high]}} "
            f"or a list of choices, got {got}",
        )  # fmt: skip
    ((scale, bounds),) = value.items()
    return Dimension((key,), place, _range(document, (*place, scale), key, scale, bounds))


def _check_tunable(document: Document, place: Place, path: str, method: Method) -> None:
    section, _, field = path.partition(".")
    if section == "kfac" and not method.has_kfac:
        raise document.error(place, f" has no effect: method {method.name} has no kfac section")
    if section in ("optimizer", "kfac"):
        if field and path not in known_paths():
            fields = [known.partition(".")[2] for known in known_paths() if known.startswith(f"{section}.")]
            raise document.error(place, f" is not a field of {section}{not_allowed(field, fields)}")
        return
    allowed = (*TUNED_TRAINING, *(OPTION + option for option in TUNED_OPTIONS))
    if path not in allowed:
        raise document.error(
            place, f" is not a hyperparameter; tunable are fields of optimizer and kfac, and "
            f"{', '.join(allowed)}{did_you_mean(path, (*known_paths(), *allowed))}",
        )  # fmt: skip


def _choices(document: Document, place: Place, key: str, values: list[Any]) -> list[Fields]:
    if len(values) < 2:
        raise document.error(
            place, " has fewer than two choices, so nothing is searched; write the value in the method"
        )
    seen: dict[str, int] = {}
    found: list[Fields] = []
    for index, value in enumerate(values):
        first = seen.setdefault(json.dumps(value, sort_keys=True), index)
        if first != index:
            raise document.error((*place, index), f"={value!r} repeats choice {first}")
        found.append(dict(leaves(document, (*place, index), key, value, SHARED)))
    return found


def _range(document: Document, place: Place, key: str, scale: str, bounds: Any) -> Callable[[float], Fields]:
    numbers = isinstance(bounds, list) and all(type(bound) in (int, float) for bound in bounds)
    if not numbers or len(bounds) != 2:
        raise document.error(place, f" must be [low, high], two numbers, got {described(bounds)}")
    low, high = bounds
    if not low < high:
        raise document.error(
            place, f"={bounds} is empty; low must be < high" if low > high else
            f"={bounds} has one value, so nothing is searched; write it in the method",
        )  # fmt: skip
    if scale == "log" and low <= 0:
        raise document.error(place, f"={bounds} must be > 0 for a logarithmic range")
    if scale == "one_minus_log" and high >= 1:
        raise document.error(place, f"={bounds} must be < 1, because 1 - x is drawn on a logarithmic range")
    kinds = {float} if key.startswith(OPTION) else scalar_types(key, set())
    if not kinds & {int, float}:
        raise document.error(place, f" is a range, and {key} is not a number; write a list of choices")
    whole = float not in kinds
    if whole and not all(type(bound) is int for bound in bounds):
        raise document.error(place, f"={bounds} must be whole numbers, as {key} is")
    to_scale, back = _SCALES[scale]
    first, last = to_scale(low), to_scale(high)

    def at(share: float) -> Fields:
        value = back(first + share * (last - first))
        if whole:
            return {key: Leaf(min(max(round(value), low), high), place[:-1])}
        return {key: Leaf(float(min(max(_rounded(value, scale), low), high)), place[:-1])}

    return at


def _rounded(value: float, scale: str) -> float:
    """Few digits of the number, or of its distance from one: 0.98765 is 0.9877 there."""
    if scale == "one_minus_log":
        return round(1 - float(f"{1 - value:.{_DIGITS}g}"), 12)
    return float(f"{value:.{_DIGITS}g}")
