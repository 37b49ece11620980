"""`harness.bench core`: starts the ranks and summarises their figures (no torch here)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from harness.bench.start import measure_on_ranks

KINDS = ("full", "factor", "plain")
INTERVALS = ((1, 1), (10, 10), (10, 100))
"""Pairs of factor and inverse update interval that are reported."""


@dataclass(frozen=True)
class CoreBench:
    """The settings; the same for every rank.

    Attributes:
        model: key of `harness.bench.replica.MODELS`.
        batch: examples of each rank.
        kfac: settings of `KFACConfig` beside the intervals.
        repeats: measured rounds; each has two plain iterations and one of every kind.
        warmup: rounds before them.
    """

    model: str
    batch: int
    ranks: int
    threads: int
    kfac: dict[str, Any]
    repeats: int = 7
    warmup: int = 1

    def run(self) -> dict[str, Any]:
        """Measure on ranks of this machine.

        Returns:
            `bench`: these settings; `sgd`: median and quartiles in seconds; `ratios`: of an iteration to
            SGD's by interval; `plain_ratio`; `phases`: see `_phase`; `memory` by rank; `calls`; `ranks`:
            everything measured.

        Raises:
            UserError: a rank failed; with the end of its log.
        """
        return {"bench": asdict(self), **summary(measure_on_ranks("harness.bench.core_rank", asdict(self)))}


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over repetitions of the slowest rank of each; see `CoreBench.run`."""
    sgd = _spread(slowest(rank["sgd"] for rank in ranks))
    totals = {kind: _median(ranks, kind, "total") for kind in KINDS}
    phases = sorted(
        {phase for rank in ranks for kind in KINDS for step in rank["kinds"][kind] for phase in step}
    )
    return {
        "sgd": sgd,
        "ratios": {f"{f}/{e}": amortised(totals, f, e) / sgd["median"] for f, e in INTERVALS},
        "plain_ratio": totals["plain"] / sgd["median"],
        "phases": {phase: _phase(ranks, phase, sgd["median"]) for phase in phases},
        "memory": [rank["memory"] for rank in ranks],
        "calls": ranks[0]["calls"],
        "ranks": ranks,
    }


def amortised(seconds: Mapping[str, float], factor_steps: int, inverse_steps: int) -> float:
    """Mean seconds per step over one inverse period, from the seconds of each kind of step."""
    factor_only = inverse_steps // factor_steps - 1
    plain = inverse_steps - 1 - factor_only
    return (seconds["full"] + factor_only * seconds["factor"] + plain * seconds["plain"]) / inverse_steps


def slowest(ranks: Iterable[list[float]]) -> list[float]:
    """For each repetition the largest time of all ranks."""
    return [max(times) for times in zip(*ranks, strict=True)]


def _phase(ranks: list[dict[str, Any]], phase: str, sgd: float) -> dict[str, Any]:
    """Spread over repetitions in a full step, and ratio to SGD's time by kind of step."""
    return {
        "seconds": _spread(_times(ranks, "full", phase)),
        "of_sgd": {kind: _median(ranks, kind, phase) / sgd for kind in KINDS},
    }


def _median(ranks: list[dict[str, Any]], kind: str, phase: str) -> float:
    return statistics.median(_times(ranks, kind, phase))


def _times(ranks: list[dict[str, Any]], kind: str, phase: str) -> list[float]:
    return slowest([step.get(phase, 0.0) for step in rank["kinds"][kind]] for rank in ranks)


def _spread(times: list[float]) -> dict[str, float]:
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return {"median": statistics.median(times), "low": quartiles[0], "high": quartiles[2], "n": len(times)}
