"""What a study shows, computed once; report, terminal and figures read it from here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pandas as pd

from analysis.comparisons import Comparison, baselines, comparisons, points
from analysis.completeness import LeftOut
from analysis.metrics import time_to_accuracy
from analysis.records.study import Study, once_per_study
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


@dataclass(frozen=True)
class Results:
    """The results of a study, by the rule of its `scoring`.

    Attributes:
        scored: times to the target, as `analysis.metrics.time_to_accuracy` gives them.
        baselines: the first-order arm that each arm is compared with.
        comparisons: every arm against it, by arm and world size, with verdicts.
        left_out: runs that are not scored.
        places: every setting and world size with scored runs, settings by name, then world sizes; none of
            trials.
    """

    scored: pd.DataFrame
    baselines: dict[str, str]
    comparisons: dict[tuple[str, int], Comparison]
    left_out: LeftOut
    places: list[Place]

    @property
    def best(self) -> list[Place]:
        """Of every setting the world size that is fastest of those judged: what a study recommends."""
        groups = groupby((place for place in self.places if place.judged), key=lambda one: one.setting)
        return [min(own, key=lambda one: (one.fastest.seconds, one.world_size)) for _, own in groups]


@once_per_study
def results(study: Study) -> Results:
    """What a study shows."""
    scored, base = time_to_accuracy(study), baselines(study)
    against = comparisons(study, scored)
    places = [] if has_trials(study) else _places(scored, against, base)
    return Results(scored, base, against, LeftOut(study), places)


def _places(
    scored: pd.DataFrame, against: dict[tuple[str, int], Comparison], base: dict[str, str]
) -> list[Place]:
    crowded = scored.groupby(["setting", "world_size"])["oversubscribed"].any().to_dict()
    found = [
        _point(runs, against.get((arm, size)), base.get(arm, ""), crowded)
        for arm, size, runs in points(scored)
    ]
    order = sorted(  # of equal ones the simpler first
        found, key=lambda one: (one.setting, one.world_size, one.seconds, not one.is_baseline, one.arm)
    )
    groups = groupby(order, key=lambda one: (one.setting, one.world_size))
    return [Place(setting, size, tuple(members)) for (setting, size), members in groups]


def _point(runs: pd.DataFrame, against: Comparison | None, baseline: str, crowded: dict[Any, bool]) -> Point:
    arm, setting, size = runs[["arm", "setting", "world_size"]].iloc[0]
    each = zip(runs["seconds"], runs["reached"], strict=True)
    return Point(
        str(arm), str(setting), int(size),
        seconds=level(runs["scored_seconds"].tolist()).estimate,
        epochs=level(runs["scored_epochs"].tolist()).estimate,
        seconds_per_epoch=level(runs["seconds_per_epoch"].dropna().tolist()).estimate,
        each=tuple((float(seconds), bool(reached)) for seconds, reached in each),
        against=against, baseline=baseline, oversubscribed=bool(crowded[setting, size]),
    )  # fmt: skip
