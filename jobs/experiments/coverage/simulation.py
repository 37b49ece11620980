"""What the tool says about simulated studies: coverage, false claims and power, by its own functions."""

from __future__ import annotations

import math
import zlib
from collections import Counter
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from analysis.comparisons import Comparison, compared, judged, ran_apart
from analysis.completeness import selected
from analysis.statistics.intervals import Interval, level
from analysis.statistics.trend import trend
from jobs.experiments.coverage.studies import NOISE, Array, Design, Mask, Studies

STUDIES = 1000

MORE_STUDIES = 20_000
"""Of rows that 1,000 studies leave in doubt."""
EFFECTS = (1.0, 1.1, 1.25)
"""How many times as fast as its baseline the first arm is: no difference, 10 % and 25 %."""


@dataclass(frozen=True)
class Result:
    """Shares of studies; NaN where a share has no meaning.

    Attributes:
        method: of the interval, in most studies.
        refused: comparisons of equal arms without a verdict, although their runs are enough.
        without: comparisons of equal arms, or levels, without an interval that are not refused.
        coverage: of equal arms: intervals that hold the true ratio, or level, of all that there are. No claim
            rests on a refused one.
        coverage_25: the same where the first arm is 1.25 times as fast.
        false_claims: studies of equal arms that claim any difference.
        power_10: studies that find the first arm faster, of those where it is 1.1 times as fast.
        power_25: the same at 1.25 times.
        unscored: of a rule: studies of equal arms without a score of both.
        score_95: of a rule: the factor between the scores of two equal arms that 95 % of studies stay below.
    """

    method: str
    refused: float = math.nan
    without: float = math.nan
    coverage: float = math.nan
    coverage_25: float = math.nan
    false_claims: float = math.nan
    power_10: float = math.nan
    power_25: float = math.nan
    unscored: float = math.nan
    score_95: float = math.nan


def generator(name: str) -> np.random.Generator:
    """A random generator of a row's own, so that rows can be made again one by one."""
    return np.random.default_rng(zlib.crc32(name.encode()))


def comparisons_of(design: Design, rng: np.random.Generator, studies: int) -> Result:
    """Simulate studies that compare arms with a baseline."""
    drawn = Studies(design, rng, studies)
    states = [drawn.completed(effect) for effect in EFFECTS]
    seconds = [drawn.seconds(effect) for effect in EFFECTS]
    counted = Counts()
    for study in range(studies):
        others = Others()
        for effect in range(len(EFFECTS)):
            counted.add(effect, verdicts(drawn, study, seconds[effect], states[effect], others))
    return counted.result(studies)


class Others:
    """What all effects of a study have in common: whatever is not about arm 1."""

    def __init__(self) -> None:
        self.runs: dict[int, dict[str, list[Any]]] = {}
        self.refused: dict[int, str] = {}
        self.speedups: dict[tuple[int, int], Interval] = {}


def verdicts(
    drawn: Studies, study: int, seconds: Array, states: tuple[Mask, Mask], known: Others | None = None
) -> dict[int, Comparison]:
    """The comparisons of one study, by arm; as `analysis.comparisons.comparisons` makes them of records."""
    known = known or Others()
    done, ended = states
    arms = range(1, drawn.design.comparisons + 1)
    for arm in (0, *arms):
        if arm == 1 or arm not in known.runs:
            known.runs[arm] = drawn.columns(study, arm, seconds, done)
    base = known.runs[0]
    for arm in arms:
        if (arm == 1 and drawn.selects) or arm not in known.refused:
            apart = ran_apart("arm", "base", known.runs[arm], base)
            known.refused[arm] = _selection(ended, done, study, arm) or apart
    family = sum(not why for why in known.refused.values())
    found = {}
    for arm in arms:
        if arm == 1 or (arm, family) not in known.speedups:
            speedup = compared(base, known.runs[arm], "scored_seconds", family)
            known.speedups[arm, family] = speedup
        one = known.speedups[arm, family]
        found[arm] = Comparison("arm", "base", 1, one, one, one, refused=known.refused[arm])
    return judged(found)


def _selection(ended: Mask, done: Mask, study: int, arm: int) -> str:
    if not ended[study].any():
        return ""
    for one in (arm, 0):
        own = int(ended[study, one].sum())
        if said := selected("arm", own, own + int(done[study, one].sum())):
            return said
    return ""


class Counts:
    """Adds up the comparisons of many studies."""

    def __init__(self) -> None:
        self.methods: Counter[str] = Counter()
        self.compared = self.refused = self.without = self.false = 0
        self.covered: dict[int, list[bool]] = {0: [], 2: []}
        self.found = [0] * len(EFFECTS)

    def add(self, effect: int, found: dict[int, Comparison]) -> None:
        """One study at an effect, given by its place in `EFFECTS`."""
        first = found[1]
        self.found[effect] += first.verdict == "faster"
        if effect == 2 and (inside := _covers(first.speedup, EFFECTS[2])) is not None and not first.refused:
            self.covered[2].append(inside)
        if effect:
            return
        self.false += any(one.verdict in ("faster", "slower") for one in found.values())
        for one in found.values():
            self.methods[one.speedup.method] += 1
            self.compared += 1
            self.refused += bool(one.refused)
            inside = _covers(one.speedup, 1.0)
            self.without += inside is None and not one.refused
            if inside is not None and not one.refused:
                self.covered[0].append(inside)

    def result(self, studies: int) -> Result:
        """The shares."""
        if not self.compared:
            return Result("none")
        return Result(
            self.methods.most_common(1)[0][0], self.refused / self.compared, self.without / self.compared,
            _share(self.covered[0]), _share(self.covered[2]),
            self.false / studies, self.found[1] / studies, self.found[2] / studies,
        )  # fmt: skip


def _covers(interval: Interval, truth: float) -> bool | None:
    if interval.low is None or interval.high is None:
        return None
    return interval.low <= truth <= interval.high


def _share(covered: list[bool]) -> float:
    return sum(covered) / len(covered) if covered else math.nan


def levels_of(design: Design, rng: np.random.Generator, studies: int, own: bool = False) -> Result:
    """Simulate the level of one arm; its truth is the median of the runs of all studies.

    Args:
        design: in which only the first arm is looked at.
        rng: of the row.
        studies: number of simulated ones.
        own: take as the truth the median run under the loads of the study itself.
    """
    truths = np.full(studies, _median_run(design))
    drawn = Studies(design, rng, studies)
    if own:
        grid = 0.1 * np.array([NormalDist().inv_cdf((i + 0.5) / 99) for i in range(99)])
        spread = drawn.loads.reshape(studies, -1, 1) + grid
        truths = np.median(spread.reshape(studies, -1), axis=1)
    seconds, (done, _) = drawn.seconds(1.0), drawn.completed(1.0)
    methods: Counter[str] = Counter()
    covered = []
    for study in range(studies):
        one = level(seconds[study, 1][done[study, 1]].tolist())
        methods[one.method] += 1
        inside = _covers(one, math.exp(truths[study]))
        if inside is not None:
            covered.append(inside)
    return Result(methods.most_common(1)[0][0], without=1 - len(covered) / studies, coverage=_share(covered))


def _median_run(design: Design) -> float:
    """Of the logs of a run's seconds; loads and blocks are symmetric around 0."""
    return float(np.median(NOISE[design.noise](np.random.default_rng(1), (1_000_000,))))


def trends_of(design: Design, rng: np.random.Generator, studies: int) -> Result:
    """Simulate the test for drift over a study, whose last run takes 10 % or 25 % longer than its first."""
    drawn = Studies(design, rng, studies)
    last = drawn.slots.max()
    found = []
    for effect in EFFECTS:
        logs = drawn.logs + math.log(effect) * drawn.slots / last
        claims = 0
        for study in range(studies):
            p = trend(zip(drawn.slots[study], logs[study], strict=True)).p_value
            claims += p is not None and p < 0.05
        found.append(claims / studies)
    return Result("Mann-Kendall within arms", false_claims=found[0], power_10=found[1], power_25=found[2])
