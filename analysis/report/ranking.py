"""The points of a study from the fastest to the slowest, as the top of the report shows them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import pandas as pd

from analysis.comparisons import Comparison, baselines, comparisons, points
from analysis.metrics import time_to_accuracy
from analysis.records.study import Study
from analysis.statistics.intervals import level
from analysis.tuning import has_trials


@dataclass(frozen=True)
class Point:
    """The scored runs of one arm on one world size.

    Attributes:
        setting: what a comparison holds fixed; empty if the study has only one.
        seconds: to the target, median over runs with a miss as infinity.
        epochs: to the target, likewise.
        seconds_per_epoch: median over runs.
        each: seconds of every run, and whether it reached the target; those of a miss are where it stopped.
        against: comparison with the first-order arm there, if there is one and this is another arm.
        baseline: name of that first-order arm, or nothing.
        oversubscribed: whether runs had more ranks than CPUs, so that seconds are not judged.
    """

    arm: str
    setting: str
    world_size: int
    seconds: float
    epochs: float
    seconds_per_epoch: float
    each: tuple[tuple[float, bool], ...]
    against: Comparison | None
    baseline: str
    oversubscribed: bool

    @property
    def runs(self) -> int:
        """How many were scored."""
        return len(self.each)

    @property
    def reached(self) -> int:
        """How many reached the target."""
        return sum(reached for _, reached in self.each)

    @property
    def is_baseline(self) -> bool:
        """Whether this is the first-order arm of its setting."""
        return self.arm == self.baseline


@dataclass(frozen=True)
class Place:
    """All points of one setting and world size, fastest first; those whose median run missed are last."""

    setting: str
    world_size: int
    points: tuple[Point, ...]

    @property
    def judged(self) -> bool:
        """Whether its seconds mean something: there were enough CPUs, and an arm's median run arrived."""
        return not self.points[0].oversubscribed and math.isfinite(self.points[0].seconds)

    @property
    def fastest(self) -> Point:
        """The first of its points."""
        return self.points[0]

    @property
    def baseline(self) -> Point | None:
        """The point of the first-order arm, if it was scored here."""
        return next((point for point in self.points if point.is_baseline), None)


def ranking(study: Study) -> list[Place]:
    """Every setting and world size with scored runs, settings by name, then world sizes; none of trials."""
    if has_trials(study):
        return []
    scored = time_to_accuracy(study)
    if scored.empty:
        return []
    against, base = comparisons(study, scored), baselines(study)
    oversubscribed = set(scored[scored["oversubscribed"]]["world_size"])
    found = [
        _point(arm, size, runs, against.get((arm, size)), base.get(arm, ""), size in oversubscribed)
        for arm, size, runs in points(scored)
    ]
    order = sorted(  # of equal ones the simpler first
        found, key=lambda one: (one.setting, one.world_size, one.seconds, not one.is_baseline, one.arm)
    )
    groups = groupby(order, key=lambda one: (one.setting, one.world_size))
    return [Place(setting, size, tuple(members)) for (setting, size), members in groups]


def shortlist(places: Sequence[Place], rows: int = 5) -> list[Point]:
    """The fastest points of all world sizes by time, and the fastest first-order one.

    Of a study of several settings, whose times do not compare, the fastest of each setting with the fastest
    of its first-order arm and of its others. Points that are not judged only where no point is.
    """
    judged = [place for place in places if place.judged]
    every = [point for place in judged or places for point in place.points if math.isfinite(point.seconds)]
    if not any(point.is_baseline for point in every):  # it missed: its row says so
        every += [place.baseline for place in judged if place.baseline is not None]
    by_time = sorted(every, key=lambda one: (one.seconds, one.arm, one.world_size))
    settings = dict.fromkeys(point.setting for point in by_time)
    if len(settings) > 1:
        best = [point for setting in sorted(settings) for point in _best(by_time, setting)]
        return best[: 3 * rows]
    first = next((point for point in by_time if point.is_baseline), None)
    chosen = by_time[:rows]
    if first is not None and first not in chosen:
        chosen = [*by_time[: rows - 1], first]
    return chosen


def _best(by_time: Sequence[Point], setting: str) -> list[Point]:
    own = [point for point in by_time if point.setting == setting]
    first = [point for point in own if point.is_baseline][:1]
    others = [point for point in own if not point.is_baseline][:1]
    return list(dict.fromkeys([own[0], *others, *first]))


def _point(
    arm: str, size: int, runs: pd.DataFrame, against: Comparison | None, baseline: str, oversubscribed: bool
) -> Point:
    each = zip(runs["seconds"], runs["reached"], strict=True)
    return Point(
        arm, str(runs["setting"].iloc[0]), size,
        seconds=level(runs["scored_seconds"].tolist()).estimate,
        epochs=level(runs["scored_epochs"].tolist()).estimate,
        seconds_per_epoch=level(runs["seconds_per_epoch"].dropna().tolist()).estimate,
        each=tuple((float(seconds), bool(reached)) for seconds, reached in each),
        against=against, baseline=baseline, oversubscribed=oversubscribed,
    )  # fmt: skip
