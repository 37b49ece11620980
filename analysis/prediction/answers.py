"""Predictions as plain values, with notes, for programs and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from analysis.prediction.bounds import LEVEL, PRIOR_COUNT
from analysis.prediction.choice import Candidate, Choice, choose, sentence
from analysis.prediction.errors import PredictionError
from analysis.prediction.prediction import StudyModel

_NEAR = 0.1  # of held-out errors that the notes count


def predictions(
    model: StudyModel, world_sizes: Sequence[int] | None = None, memory_bytes: int | None = None
) -> dict[str, Any]:
    """Every way to train at every world size, fastest first, with a recommendation for each size.

    By default the sizes are those measured, and three doublings beyond the largest.

    Raises:
        PredictionError: nothing can be predicted at any of them.
    """
    known = sorted({size for fitted in model.arms.values() for size in fitted.worlds})
    choices: list[Choice] = []
    left: list[str] = []
    for size in world_sizes or [*known, *(known[-1] * 2**power for power in (1, 2, 3))]:
        try:
            choices.append(choose(model, size, memory_bytes))
        except PredictionError as error:
            left.append(str(error))
    if not choices:
        raise PredictionError("; ".join(left))
    reasons = [note for choice in choices for note in choice.notes]
    return {
        "study": model.measured.name,
        "links": model.links.source,
        "measured_world_sizes": list(model.measured.world_sizes),
        "error_per_doubling": model.errors.per_doubling,
        "repeatability": {str(size): one.spread for size, one in model.errors.repeatability.items()},
        "held_out": [
            {
                "arm": one.arm, "world_size": one.world_size,
                "seconds": one.measured, "predicted": one.predicted,
            }
            for one in model.errors.held_out
        ],
        "worlds": [
            {
                "world_size": choice.world_size, "recommendation": sentence(choice),
                "sureness": choice.sureness, "to_target": choice.to_target,
                "candidates": [_candidate(one) for one in (*choice.candidates, *choice.others)],
            }
            for choice in choices
        ],
        "notes": [*notes_on(model, choices[-1].world_size), *dict.fromkeys([*reasons, *left])],
    }  # fmt: skip


def _candidate(one: Candidate) -> dict[str, Any]:
    step, total = one.step, one.total
    return {
        "name": one.name, "ran": one.ran, "measured": step.measured,
        "seconds": step.seconds.central, "low": step.seconds.low, "high": step.seconds.high,
        "largest_phase": step.largest_phase,
        "grad_worker_fraction": None if step.config is None else step.config.grad_worker_fraction,
        "phase_seconds": {str(phase): seconds for phase, seconds in step.phases.items()},
        "epochs": one.epochs,
        "peak_bytes": None if math.isnan(one.peak_bytes) else one.peak_bytes,
        "seconds_to_target": None if total is None else total.central,
        "low_to_target": None if total is None else total.low,
        "high_to_target": None if total is None else total.high,
    }  # fmt: skip


def notes_on(model: StudyModel, largest: int) -> list[str]:
    """What a reader has to know of predictions up to `largest` ranks, a sentence each."""
    own, errors = model.measured, model.errors
    spread = (
        f"low and high: {LEVEL:.0%} bounds for one run, from the spread between runs and, beyond measured "
        f"worlds, {errors.per_doubling:.1%} (a standard deviation) per doubling of the ranks, the error of "
        f"{errors.count} held-out predictions, {PRIOR_COUNT} of them on limited links"
    )
    if not own.world_sizes:
        return [*own.notes, f"links: {model.links.source}", spread]
    found = [f"measured on {', '.join(map(str, own.world_sizes))} ranks; links: {model.links.source}"]
    off = [abs(one.predicted / one.measured - 1) for one in errors.held_out]
    if off:
        within, mean = sum(error <= _NEAR for error in off), sum(off) / len(off)
        found.append(
            f"measured worlds predicted from the others: {within} of {len(off)} within {_NEAR:.0%}, "
            f"mean error {mean:.1%}"
        )
    else:
        found.append("no measured world could be predicted from the others, so the error here is unknown")
    found.append(spread)
    if any(one.of_windows for one in errors.repeatability.values()):
        found.append("some world sizes have one run an arm: the spread between runs is that between windows")
    if own.one_host and largest > own.world_sizes[-1]:
        found.append(
            "all ranks were on one host, so links between hosts are not in these predictions; measure a "
            "world of two hosts too"
        )
    return [*found, *own.notes]
