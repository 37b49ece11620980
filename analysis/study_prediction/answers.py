"""Predictions and recommendations as plain values, with notes, for programs and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from analysis.cost_model.errors import CostModelError
from analysis.study_prediction.bounds import LEVEL, PRIOR_COUNT
from analysis.study_prediction.choice import Candidate, choose, sentence
from analysis.study_prediction.prediction import StepPrediction, StudyModel, table

_NEAR = 0.1  # of held-out errors that the notes count


def predictions(model: StudyModel, world_sizes: Sequence[int] | None = None) -> dict[str, Any]:
    """Every arm at every world size; by default those measured, and three doublings beyond the largest.

    Raises:
        CostModelError: nothing can be predicted at any of them.
    """
    known = model.measured.world_sizes
    sizes = world_sizes or [*known, *(known[-1] * 2**power for power in (1, 2, 3))]
    found, left = table(model, sizes)
    if not found:
        raise CostModelError(f"nothing can be predicted: {'; '.join(left)}")
    rows = [_row(one) for arms in found.values() for one in arms.values()]
    notes = [*notes_on(model, max(found)), *(f"left out: {reason}" for reason in left)]
    return {**_about(model), "arms": rows, "notes": notes}


def recommendation(model: StudyModel, world_size: int, memory_bytes: int | None = None) -> dict[str, Any]:
    """What to use at a world size, with all candidates that fit in a rank's memory, fastest first.

    Raises:
        CostModelError: nothing can be predicted there, or nothing fits.
    """
    choice = choose(model, world_size, memory_bytes=memory_bytes)
    return {
        "recommendation": sentence(choice),
        "sureness": choice.sureness,
        "to_target": choice.to_target,
        "candidates": [_candidate(one) for one in choice.candidates],
        "notes": [*choice.notes, *notes_on(model, world_size)],
    }


def _row(one: StepPrediction) -> dict[str, Any]:
    fraction = None if one.config is None else one.config.grad_worker_fraction
    return {
        "arm": one.arm.name, "world_size": one.world_size, "measured": one.measured,
        "seconds": one.seconds.central, "low": one.seconds.low, "high": one.seconds.high,
        "largest_phase": str(one.largest_phase), "doublings": one.doublings,
        "grad_worker_fraction": fraction,
        "phase_seconds": {str(phase): seconds for phase, seconds in one.phases.items()},
    }  # fmt: skip


def _candidate(one: Candidate) -> dict[str, Any]:
    total = one.total
    return {
        **_row(one.step),
        "name": one.name,
        "ran": one.ran,
        "epochs": one.epochs,
        "peak_bytes": None if math.isnan(one.peak_bytes) else one.peak_bytes,
        "seconds_to_target": None if total is None else total.central,
        "low_to_target": None if total is None else total.low,
        "high_to_target": None if total is None else total.high,
    }


def _about(model: StudyModel) -> dict[str, Any]:
    return {
        "study": model.measured.name,
        "links": model.links.source,
        "measured_world_sizes": list(model.measured.world_sizes),
        "error_per_doubling": model.errors.per_doubling,
        "repeatability": {str(size): one.spread for size, one in model.errors.repeatability.items()},
        "held_out": [
            {
                "arm": one.arm,
                "world_size": one.world_size,
                "seconds": one.measured,
                "predicted": one.predicted,
            }
            for one in model.errors.held_out
        ],
    }


def notes_on(model: StudyModel, largest: int) -> list[str]:
    """What a reader has to know of predictions up to `largest` ranks, a sentence each."""
    own, errors = model.measured, model.errors
    sizes = ", ".join(map(str, own.world_sizes))
    found = [f"measured on {sizes} ranks; links: {model.links.source}"]
    off = [abs(one.predicted / one.measured - 1) for one in errors.held_out]
    if off:
        within, mean = sum(error <= _NEAR for error in off), sum(off) / len(off)
        found.append(
            f"measured worlds predicted from the others: {within} of {len(off)} within {_NEAR:.0%}, "
            f"mean error {mean:.1%}"
        )
    else:
        found.append("no measured world could be predicted from the others, so the error here is unknown")
    found.append(
        f"low and high: {LEVEL:.0%} bounds for one run, from the spread between runs and, beyond measured "
        f"worlds, {errors.per_doubling:.1%} (a standard deviation) per doubling of the ranks, the error of "
        f"{errors.count} held-out predictions, {PRIOR_COUNT} of them on shaped links"
    )
    if any(one.of_windows for one in errors.repeatability.values()):
        found.append("some world sizes have one run an arm: the spread between runs is that between windows")
    if own.one_host and largest > own.world_sizes[-1] and "calibration" not in model.links.source:
        found.append(
            "all ranks were on one host, so links between hosts are not in these predictions; "
            "--calibration takes them from one"
        )
    return [*found, *own.notes]
