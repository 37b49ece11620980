"""How far off predictions are: spread between runs, and errors at worlds that were held out.

A bound is a Student t interval of the log of a step's seconds. Its standard deviation adds up, in squares,

- the repeatability on the nearest measured world size: the spread between runs of one arm, pooled over arms;
  or, where no arm has two runs, the spread of windows within a run, not divided by the root of their number:
  a mean over windows evens out noise, but not what differs from run to run;
- the model's error, in proportion to the doublings from the nearest measured world to the predicted one. Per
  doubling it is the root mean square of the errors at worlds of this study that were held out in turn,
  together with those of the validation on shaped links, which every study starts from;
- what the laws leave open: latency or bandwidth, and how messages grow with the ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from scipy.special import stdtrit

from analysis.prediction.arms import Arm, World
from analysis.prediction.laws import Seconds

LEVEL = 0.9
"""Coverage of the bounds."""

PRIOR_ERROR, PRIOR_COUNT = 0.046, 6
"""Root mean square of the errors of the six totals in results/prediction/shaped_links_totals.csv, whose world
is one doubling beyond the largest one that they were predicted from; and how many there are."""

_SIDE = NormalDist().inv_cdf((1 + LEVEL) / 2)  # of a bound that the laws leave open, read as this level
_FINEST = 1e-4  # relative: a clock and a scheduler are not better than this
_LEAST_SHARE = 1e-3  # of a prediction that the laws allow to be next to nothing


@dataclass(frozen=True)
class HeldOut:
    """A measured world, predicted from the study's other worlds.

    Attributes:
        doublings: from the nearest of them.
        error: log of predicted over measured seconds a step.
    """

    arm: str
    world_size: int
    doublings: float
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Log of predicted over measured seconds a step."""
        return math.log(self.predicted / self.measured)


@dataclass(frozen=True)
class Repeatability:
    """Spread between runs of one arm on one world size.

    Attributes:
        spread: standard deviation of the log of a step's seconds.
        freedom: degrees of freedom of it.
        of_windows: no arm has two runs of this size, so it is the spread of windows.
    """

    spread: float
    freedom: int
    of_windows: bool


@dataclass(frozen=True)
class Errors:
    """Spread and errors of one study, as standard deviations of logs.

    Attributes:
        repeatability: by measured world size.
        per_doubling: of the model.
        count: how many errors that is from.
    """

    repeatability: Mapping[int, Repeatability]
    per_doubling: float
    count: int
    held_out: tuple[HeldOut, ...]

    def measured(self, runs: Sequence[float], world_size: int) -> Seconds:
        """The typical run, and bounds for one more run of the same arm and world."""
        own = self.repeatability[world_size]
        half = _times(own.freedom) * own.spread * math.sqrt(1 + 1 / len(runs))
        return _around(math.exp(sum(map(math.log, runs)) / len(runs)), half, half)

    def predicted(self, seconds: Seconds, doublings: float, nearest: int, runs: int) -> Seconds:
        """Bounds for a run of a world so many doublings from `nearest`, a measured one with `runs`."""
        own = self.repeatability[nearest]
        repeats = own.spread**2 * (1 + 1 / runs)
        model = (self.per_doubling * max(doublings, 1.0)) ** 2
        least = _times(own.freedom) * math.sqrt(repeats)
        sides = (
            math.log(seconds.central / max(seconds.low, _LEAST_SHARE * seconds.central)) / _SIDE,
            math.log(max(seconds.high, seconds.central) / seconds.central) / _SIDE,
        )
        low, high = (
            max(least, _half_width([(repeats, own.freedom), (model, self.count), (side**2, math.inf)]))
            for side in sides
        )
        return _around(seconds.central, low, high)


def _half_width(variances: Sequence[tuple[float, float]]) -> float:
    """Of a sum of independent errors with variances and degrees of freedom (Welch and Satterthwaite's)."""
    total = sum(variance for variance, _ in variances)
    freedom = total**2 / sum(variance**2 / degrees for variance, degrees in variances)
    return _times(freedom) * math.sqrt(total)


def _times(freedom: float) -> float:
    return float(stdtrit(freedom, (1 + LEVEL) / 2))


def errors(arms: Sequence[Arm], held_out: Sequence[HeldOut]) -> Errors:
    """The errors of a study."""
    sizes = sorted({size for arm in arms for size in arm.worlds})
    repeatability = {
        size: _repeatability([arm.worlds[size] for arm in arms if size in arm.worlds]) for size in sizes
    }
    counted = [one for one in held_out if one.doublings > 0]
    total = PRIOR_COUNT * PRIOR_ERROR**2 + sum((one.error / one.doublings) ** 2 for one in counted)
    count = PRIOR_COUNT + len(counted)
    return Errors(repeatability, math.sqrt(total / count), count, tuple(held_out))


def _repeatability(worlds: Sequence[World]) -> Repeatability:
    """Of one world size, over all arms."""
    squares = sum(math.log(run / world.seconds) ** 2 for world in worlds for run in world.runs)
    freedom = sum(len(world.runs) - 1 for world in worlds)
    windows = math.sqrt(sum(world.window_spread**2 for world in worlds) / len(worlds))
    number = sum(world.windows for world in worlds)
    if not freedom:
        return Repeatability(max(_FINEST, windows), max(1, round(number) - len(worlds)), of_windows=True)
    least = max(_FINEST, windows / math.sqrt(max(1.0, number / len(worlds))))
    return Repeatability(max(least, math.sqrt(squares / freedom)), freedom, of_windows=False)


def _around(central: float, low: float, high: float) -> Seconds:
    """An interval with these half widths, in logs."""
    return Seconds(central * math.exp(-low), central, central * math.exp(high))
