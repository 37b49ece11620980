"""`kronscale bench ablation`: a phase's time as a difference, beside what the timer says (no torch here).

Zhang et al. 2022 (DP-KFAC) break a step down so: run without a part, and subtract. That knows nothing of
timers, so where both agree, neither is far off.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from harness.bench.spread import median_limits
from harness.bench.start import start_ranks
from kfac_core.phases import COMM_PHASES, Phase

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
        rounds: pairs of blocks for each phase; a block is one inverse period.
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
            start_ranks("harness.bench.ablated", folder, self.ranks, self.threads)
            files = (folder / f"rank-{rank}.json" for rank in range(self.ranks))
            measured: list[dict[str, Rounds]] = [json.loads(file.read_text()) for file in files]
        return {"bench": asdict(self), "phases": compare(measured), "ranks": measured}


def compare(ranks: list[dict[str, Rounds]]) -> dict[str, dict[str, Any]]:
    """By phase: seconds a step by timer and by ablation, each with 95 % limits of the median over rounds.

    A round has `with_seconds` and `without_seconds` of a block's step, and of the phase in it `timer_seconds`
    and `calls`; a communication phase in which no rank calls a collective is left out. A step takes as long
    as its slowest rank. Of a computing phase the timer's value is the slowest rank's, for that is what the
    others wait for, and of a communication phase the fastest rank's, for waiting does not go away with the
    phase: it moves to the next one.
    """
    table = {}
    for phase in ranks[0]:
        rounds = list(zip(*(rank[phase] for rank in ranks), strict=True))
        if not any(rank["calls"] for one in rounds for rank in one):
            continue
        pick = min if phase in COMM_PHASES else max
        timer = [pick(rank["timer_seconds"] for rank in one) for one in rounds]
        ablation = [
            max(rank["with_seconds"] for rank in one) - max(rank["without_seconds"] for rank in one)
            for one in rounds
        ]
        step = median(max(rank["with_seconds"] for rank in one) for one in rounds)
        by_timer, by_ablation = _spread(timer), _spread(ablation)
        table[phase] = {
            "timer": by_timer,
            "ablation": by_ablation,
            "step_seconds": step,
            "agree": by_timer["low"] <= by_ablation["high"] and by_ablation["low"] <= by_timer["high"],
        }
    return table


def _spread(values: list[float]) -> dict[str, float]:
    low, high = median_limits(values)
    return {"median": median(values), "low": low, "high": high}
