"""`kronscale bench ablation`: a phase's time as a difference, beside what the timer says (no torch here).

Zhang et al. 2022 (DP-KFAC) break a step down so: run without a part, and subtract. That needs no timer, so
where both agree, neither is far off. They are not the same number: without a phase the others run faster too,
for it no longer takes their caches from them, so that a step loses more than the phase. A step in which a
phase's work is done twice gains less: the second time finds its data in the caches. The phase lies between.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness.bench.median import median_interval
from harness.bench.start import start_ranks
from kfac_core.timing.phases import COMM_PHASES, Phase

ABLATED = (
    Phase.GRADIENT_COMM, Phase.FACTOR_COMPUTE, Phase.FACTOR_COMM, Phase.INVERSE_COMPUTE, Phase.INVERSE_COMM,
    Phase.PRECONDITION, Phase.PRECONDITION_COMM, Phase.SCALE,
)  # fmt: skip
"""Phases that a step can be run without; the model's own and the optimizer's it cannot."""

Rounds = list[dict[str, float]]


@dataclass(frozen=True)
class AblationBench:
    """What is measured: one cell of a sweep on ranks of this machine.

    Attributes:
        cell: the cell, as JSON; its strategy, intervals, model and batch are those of the study.
        rounds: for each phase; one is five inverse periods, of a communication phase four.
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
        with tempfile.TemporaryDirectory(prefix="kronscale-bench-") as name:
            folder = Path(name)
            options = {**asdict(self), "store": str(folder / "store")}
            (folder / "options.json").write_text(json.dumps(options))
            start_ranks("harness.bench.ablation_rank", folder, self.ranks, self.threads)
            files = (folder / f"rank-{rank}.json" for rank in range(self.ranks))
            measured: list[dict[str, Rounds]] = [json.loads(file.read_text()) for file in files]
        return {"bench": asdict(self), "phases": compare(measured), "ranks": measured}


def compare(ranks: list[dict[str, Rounds]]) -> dict[str, dict[str, Any]]:
    """By phase: seconds a step by timer and by ablation, each with 95 % limits of the median over rounds.

    A round has, of a block's step, `with_seconds`, `without_seconds` and, of computing phases,
    `twice_seconds` by a clock around blocks without timer; `timed_with_seconds` and `timed_without_seconds`
    of blocks with it; and `timer_seconds`: what the timer books on the phase, less what it still books there
    without the phase's work. A communication phase in which no rank calls a collective is left out. A step
    takes as long as its slowest rank. Of a computing phase the timer's value is the slowest rank's, for that
    is what the others wait for, and of a communication phase the fastest rank's, for waiting does not go away
    with the phase: it moves to the next one.

    Returns:
        By phase `timer`; `ablation`, the work left out; `doubling`, the work done twice, of computing phases
        (`ablation` again of others); `elsewhere`, what all other phases, as timed, lose with this one; each
        with median, low and high. `step_seconds`. `alone`: whether the limits of timer and ablation meet;
        `agree`: whether the timer's meet what lies between the limits of ablation and doubling.
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
            "alone": _meet(timer, ablation),
            "agree": _meet(timer, between),
        }
    return table


def _gain(ranks: Sequence[dict[str, float]], whole: str, part: str) -> float:
    return max(rank[whole] for rank in ranks) - max(rank[part] for rank in ranks)


def _meet(one: dict[str, float], other: dict[str, float]) -> bool:
    return one["low"] <= other["high"] and other["low"] <= one["high"]
