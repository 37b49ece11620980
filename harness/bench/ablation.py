"""`kronscale bench ablation`: a phase's time as a difference, beside the timer's value (no torch here).

Zhang et al. 2022 (DP-KFAC) break a step down like this: run it without a part, and subtract. That needs no
timer, so where both agree, neither is far off. They are not the same number. Without a phase the other phases
run faster too, because it no longer evicts their data from the caches: the step loses more than the phase. If
a phase's work is done twice, the step gains less than the phase, because the second time finds its data in
the caches. The phase's own time lies between the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from harness.bench.median import median_interval
from harness.bench.start import measure_on_ranks
from kfac_core.timing.phases import COMM_PHASES, Phase

PHASES = (
    Phase.GRADIENT_COMM, Phase.FACTOR_COMPUTE, Phase.FACTOR_COMM, Phase.INVERSE_COMPUTE, Phase.INVERSE_COMM,
    Phase.PRECONDITION, Phase.PRECONDITION_COMM, Phase.SCALE,
)  # fmt: skip
"""Phases that a step can run without: all but those of the model and the optimizer."""

Rounds = list[dict[str, float]]


@dataclass(frozen=True)
class AblationBench:
    """The settings: one cell of a sweep, on ranks of this machine.

    Attributes:
        cell: as JSON.
        rounds: for each phase; a round is five inverse periods, for a communication phase four.
    """

    cell: str
    ranks: int
    threads: int = 1
    rounds: int = 30

    def run(self) -> dict[str, Any]:
        """Measure on ranks of this machine.

        Returns:
            `bench`: these settings; `phases`: see `compare`; `ranks`: everything measured.
        """
        measured: list[dict[str, Rounds]] = measure_on_ranks("harness.bench.ablation_rank", asdict(self))
        return {"bench": asdict(self), "phases": compare(measured), "ranks": measured}


def compare(ranks: list[dict[str, Rounds]]) -> dict[str, dict[str, Any]]:
    """By phase: seconds per step by timer and by ablation, each as a median over rounds with 95 % limits.

    A round has these seconds per step. Without the timer: `with_seconds`, `without_seconds` and, for
    computing phases, `twice_seconds`. With the timer: `timed_with_seconds`, `timed_without_seconds`, and
    `timer_seconds`, which is what the timer books on the phase less what it still books without the phase's
    work. A communication phase in which no rank calls a collective is left out.

    A step takes as long as its slowest rank. The timer's value of a computing phase is the slowest rank's,
    because the others wait for it. That of a communication phase is the fastest rank's, because waiting does
    not go away with the phase: it moves to the next one.

    Returns:
        By phase `timer`; `ablation`, the work left out; `doubling`, the work done twice (`ablation` again for
        communication phases); `elsewhere`, what all other phases, as timed, lose without this one; each with
        median, low and high. `step_seconds`. `alone`: whether the limits of timer and ablation overlap;
        `agree`: whether the timer's limits overlap the range from ablation to doubling.
    """
    table = {}
    for phase in ranks[0]:
        rounds = list(zip(*(rank[phase] for rank in ranks), strict=True))
        if not any(rank["calls"] for one in rounds for rank in one):
            continue
        pick = min if phase in COMM_PHASES else max
        own = [pick(rank["timer_seconds"] for rank in one) for one in rounds]
        both = [_gain(one, "timed_with_seconds", "timed_without_seconds") for one in rounds]
        timer = median_interval(own)
        elsewhere = median_interval([gain - booked for gain, booked in zip(both, own, strict=True)])
        ablation = doubling = median_interval(
            [_gain(one, "with_seconds", "without_seconds") for one in rounds]
        )
        if "twice_seconds" in rounds[0][0]:
            doubling = median_interval([_gain(one, "twice_seconds", "with_seconds") for one in rounds])
        between = {edge: pick(ablation[edge], doubling[edge]) for edge, pick in (("low", min), ("high", max))}
        table[phase] = {
            "timer": timer,
            "ablation": ablation,
            "doubling": doubling,
            "elsewhere": elsewhere,
            "step_seconds": median(max(rank["with_seconds"] for rank in one) for one in rounds),
            "alone": _overlap(timer, ablation),
            "agree": _overlap(timer, between),
        }
    return table


def _gain(ranks: Sequence[dict[str, float]], whole: str, part: str) -> float:
    return max(rank[whole] for rank in ranks) - max(rank[part] for rank in ranks)


def _overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    return one["low"] <= other["high"] and other["low"] <= one["high"]
