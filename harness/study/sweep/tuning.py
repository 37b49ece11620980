"""Trials of `tuning`: every method gets the same number of settings from its search space.

They are drawn quasi-randomly as in AlgoPerf's external tuning (Dahl et al. 2023, section 4.4).
`kronscale choose` writes the study's sweep with the best of each.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any

from harness.study.sweep.axes import Axis, Method, own_settings, points
from harness.study.sweep.content import TuningContent
from harness.study.sweep.settings import (
    OPTION,
    SECTIONS,
    Settings,
    each,
    insert,
    known_paths,
    merged,
    refuse_repeats,
    scalar_types,
    values_of,
)
from harness.yaml_files.document import Document, Place, described
from harness.yaml_files.validation_messages import did_you_mean, not_allowed

TUNABLE = (
    *(f"training.{name}" for name in ("global_batch_size", "local_batch_size", "epochs", "kfac_start_epoch")),
    *(OPTION + name for name in ("label_smoothing", "dropout", "augment")),
)
"""Beside optimizer and K-FAC: length, batch, and how the workload is regularised. Its data, model and target
are the task, the same for all methods."""

_DIGITS = 3  # of a drawn number: more would make settings that nobody can read aloud
_DRAWS_PER_TRIAL = 200  # before a space of choices counts as exhausted

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
        at: the settings at a share of the space, in (0, 1).
    """

    paths: tuple[str, ...]
    place: Place
    at: Callable[[float], Settings]


def read_trials(
    document: Document,
    tuning: TuningContent,
    methods: Sequence[Method],
    axes: Sequence[Axis],
    overrides: Settings,
) -> dict[str, list[Settings]]:
    """The settings of every method's trials, the first one first.

    Raises:
        SweepError: a method or a field is unknown, a range or a choice is no search, a method has no space,
            the axes give more than one point, or one of them or `--set` fixes a tuned field.
    """
    for index, entry in enumerate(tuning.study.also):  # `choose` reads them again, after all trials
        own_settings(document, ("tuning", "study", "also", index), entry)
    names = [method.name for method in methods]
    for name in tuning.space:
        if name not in names:
            raise document.error(("tuning", "space", name), f" is not a method{not_allowed(name, names)}")
    fixed = {
        path: "which is an axis of the file" for axis in axes for point in axis for path, _ in each(point)
    }
    fixed |= {path: f"and {path} cannot also be --set" for path, _ in each(overrides)}
    trials = {}
    for method in methods:
        if len(list(points(axes, method))) > 1:
            raise document.error(
                ("grid",), " has several points, and trials are all at one; write a sweep for each, or "
                "give the study's axes in tuning.study.grid",
            )  # fmt: skip
        own = tuning.space.get(method.name, {})
        shared = {key: value for key, value in tuning.shared.items() if key not in own}
        space = [
            _dimension(document, (*place, key), key, value)
            for place, ranges in ((("tuning", "shared"), shared), (("tuning", "space", method.name), own))
            for key, value in ranges.items()
        ]
        if not 0 < len(space) <= MOST_DIMENSIONS:
            raise document.error(
                ("tuning", "space"), f" has {len(space)} fields for method {method.name}; every method is "
                f"tuned, with at most {MOST_DIMENSIONS}",
            )  # fmt: skip
        taken = dict(fixed)
        for dimension in space:
            for path in dimension.paths:
                if path in taken:
                    raise document.error(dimension.place, f" tunes {path}, {taken[path]}")
                taken[path] = "which another entry tunes already"
        trials[method.name] = _drawn(document, tuning, method.name, space)
    return trials


def _drawn(
    document: Document, tuning: TuningContent, method: str, space: Sequence[Dimension]
) -> list[Settings]:
    """The settings of as many points of the sequence as there are trials, each once."""
    distinct: dict[str, Settings] = {}
    for point in islice(sobol(len(space), tuning.seed), tuning.trials * _DRAWS_PER_TRIAL):
        settings = merged(*(dimension.at(share) for dimension, share in zip(space, point, strict=True)))
        distinct.setdefault(json.dumps(values_of(settings)), settings)
        if len(distinct) == tuning.trials:
            return list(distinct.values())
    raise document.error(
        ("tuning", "trials"), f"={tuning.trials} is more than the {len(distinct)} settings of method "
        f"{method}; give all methods fewer trials, or this one a larger space",
    )  # fmt: skip


def _dimension(document: Document, place: Place, key: str, value: Any) -> Dimension:
    """A dimension: choices of a field or a section, or a range of a number."""
    if isinstance(value, list):
        if len(value) < 2:
            raise document.error(
                place, " has fewer than two choices, so nothing is searched; write the value in the method"
            )
        refuse_repeats(document, place, value)
        choices: list[Settings] = [{} for _ in value]
        for index, choice in enumerate(value):
            insert(document, choices[index], (*place, index), key, choice)
        paths = tuple(dict.fromkeys(path for choice in choices for path, _ in each(choice)))
        _check_tunable(document, place, paths)
        return Dimension(paths, place, lambda share: choices[int(share * len(choices))])
    if not isinstance(value, dict) or len(value) != 1 or next(iter(value)) not in _SCALES:
        got = ", ".join(map(str, value)) if isinstance(value, dict) else described(value)
        raise document.error(
            place, f" must be {{log: [low, high]}}, {{linear: [low, high]}}, {{one_minus_log: [low, high]}} "
            f"or a list of choices, got {got}",
        )  # fmt: skip
    ((scale, bounds),) = value.items()
    if key in SECTIONS:
        raise document.error(place, f" is a section; tune its fields, such as {key}.{SECTIONS[key][0]}")
    insert(document, {}, place, key, None)  # an unknown field is an error
    _check_tunable(document, place, (key,))
    number = _range(document, (*place, scale), key, scale, bounds)

    def at(share: float) -> Settings:
        settings: Settings = {}
        insert(document, settings, place, key, number(share))
        return settings

    return Dimension((key,), place, at)


def _check_tunable(document: Document, place: Place, paths: Sequence[str]) -> None:
    for path in paths:
        if path.partition(".")[0] not in ("optimizer", "kfac") and path not in TUNABLE:
            raise document.error(
                place, f" is not a hyperparameter; tunable are fields of optimizer and kfac, and "
                f"{', '.join(TUNABLE)}{did_you_mean(path, (*known_paths(), *TUNABLE))}",
            )  # fmt: skip


def _range(document: Document, place: Place, key: str, scale: str, bounds: Any) -> Transform:
    """The number at a share of the range."""
    numbers = isinstance(bounds, list) and all(type(bound) in (int, float) for bound in bounds)
    if not numbers or len(bounds) != 2:
        raise document.error(place, f" must be [low, high], two numbers, got {described(bounds)}")
    low, high = bounds
    kinds = {float} if key.startswith(OPTION) else scalar_types(key, set())
    whole = float not in kinds
    for wrong, sentence in (
        (not low < high, "must be ascending, so that something is searched"),
        (scale == "log" and low <= 0, "must be > 0 for a logarithmic range"),
        (
            scale == "one_minus_log" and high >= 1,
            "must be < 1, because 1 - x is drawn as by log",
        ),
        (not kinds & {int, float}, f"is a range, and {key} is not a number; write a list of choices"),
        (whole and not type(low) is type(high) is int, f"must be whole numbers, as {key} is"),
    ):
        if wrong:
            raise document.error(place, f"={bounds} {sentence}")
    to_scale, back = _SCALES[scale]
    first, last = to_scale(low), to_scale(high)

    def number(share: float) -> float:
        value = back(first + share * (last - first))
        rounded = round(value) if whole else _rounded(value, scale)
        inside = min(max(rounded, low), high)
        return inside if whole else float(inside)

    return number


def _rounded(value: float, scale: str) -> float:
    """Few digits of the number, or of its distance from one: 0.98765 is 0.9877 there."""
    if scale == "one_minus_log":
        return round(1 - float(f"{1 - value:.{_DIGITS}g}"), 12)
    return float(f"{value:.{_DIGITS}g}")


# Sobol's sequence with a digital shift. `scipy.stats.qmc.Sobol` gives the same points without the shift, but
# importing it takes longer than `plan` may, and ids of cells must not change with a library's version.

_BITS = 32

# Degree, coefficients and first direction numbers of every dimension after the first: Joe and Kuo (2008),
# "Constructing Sobol sequences with better two-dimensional projections", table new-joe-kuo-6.21201.
_JOE_KUO = (
    (1, 0, (1,)), (2, 1, (1, 3)), (3, 1, (1, 3, 1)), (3, 2, (1, 1, 1)), (4, 1, (1, 1, 3, 3)),
    (4, 4, (1, 3, 5, 13)), (5, 2, (1, 1, 5, 5, 17)), (5, 4, (1, 1, 5, 5, 5)), (5, 7, (1, 1, 7, 11, 19)),
    (5, 11, (1, 1, 5, 1, 1)), (5, 13, (1, 1, 1, 3, 11)), (5, 14, (1, 3, 5, 5, 31)),
    (6, 1, (1, 3, 3, 9, 7, 49)), (6, 13, (1, 1, 1, 15, 21, 21)), (6, 16, (1, 3, 1, 13, 27, 49)),
)  # fmt: skip
MOST_DIMENSIONS = len(_JOE_KUO) + 1


def sobol(dimensions: int, seed: int) -> Iterator[tuple[float, ...]]:
    """Points in the open unit cube, without end.

    Args:
        dimensions: at most `MOST_DIMENSIONS`.
        seed: of the shift; -1 for none, the sequence itself.
    """
    directions = [_directions(dimension) for dimension in range(dimensions)]
    point = [_shift(seed, dimension) for dimension in range(dimensions)]
    index = 0
    while True:
        yield tuple((value + 0.5) / 2**_BITS for value in point)
        zeros = (~index & (index + 1)).bit_length() - 1  # Gray code (Antonov & Saleev 1979): one change
        point = [value ^ column[zeros] for value, column in zip(point, directions, strict=True)]
        index += 1


def _shift(seed: int, dimension: int) -> int:
    if seed < 0:
        return 0
    digest = hashlib.sha256(f"kronscale {seed} {dimension}".encode()).digest()
    return int.from_bytes(digest[: _BITS // 8], "big")


def _directions(dimension: int) -> list[int]:
    """The direction numbers of one dimension, as whole numbers of `_BITS` bits."""
    if dimension == 0:
        return [1 << (_BITS - 1 - bit) for bit in range(_BITS)]
    degree, coefficients, first = _JOE_KUO[dimension - 1]
    numbers = [value << (_BITS - 1 - bit) for bit, value in enumerate(first)]
    for bit in range(degree, _BITS):
        value = numbers[bit - degree] ^ (numbers[bit - degree] >> degree)
        for place in range(1, degree):
            if coefficients >> (degree - 1 - place) & 1:
                value ^= numbers[bit - place]
        numbers.append(value)
    return numbers
