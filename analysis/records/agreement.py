"""Whether the records of a run agree with each other and with its outcome.

Every check holds for any run that this project writes; a run that fails one was changed, cut, mixed up or
copied in part. Its numbers are left out of all frames, and `Study.cells` says why.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from analysis.records.histories import History, histories
from analysis.records.run_files import RunFiles

Faults = dict[str, list[str]]
"""Sentences by run."""

CLOCKS = ("epoch", "samples", "train_seconds", "eval_seconds", "wall_seconds", "checkpoint_seconds")
_TOLERANCE = 1e-6  # relative; the clock is read twice, once after its parts were added up in another order


def disagreements(
    runs: Iterable[RunFiles],
    windows: pd.DataFrame,
    evaluations: pd.DataFrame,
    metrics: pd.Series,
    segments: pd.DataFrame,
) -> Faults:
    """What does not agree, in sentences.

    Args:
        runs: the small files of every run.
        windows: one row per rank and window that counts: `run`, `rank`, `first_step`, `steps`, `segment`.
        evaluations: those that count, in the order written.
        metrics: of each evaluation, by its index; empty for one that names its target's metric alone.
        segments: all starts of all ranks, in the order written.
    """
    faults: Faults = defaultdict(list)
    ends = _tiled(windows, segments, faults)
    measured = evaluations.assign(metrics=metrics[evaluations.index])
    by_run = histories(measured, (*CLOCKS, "step", "value", "metric", "direction", "metrics"))
    starts = {str(run): rows for run, rows in segments.groupby("run")}
    for files in runs:
        if files.attempt is None:
            continue
        history, own_ends = by_run.get(files.run), ends.get(files.run, {})
        faults[files.run] += _of_outcome(files)
        if history is not None:
            faults[files.run] += _of_history(history, files)
            faults[files.run] += _of_metrics(history)
        if files.run in starts:
            faults[files.run] += _of_segments(starts[files.run])
        if files.outcome is not None and files.outcome.state == "COMPLETED":
            faults[files.run] += _of_completion(files, own_ends, history)
    return {run: sentences for run, sentences in faults.items() if sentences}


def _tiled(windows: pd.DataFrame, segments: pd.DataFrame, faults: Faults) -> dict[str, dict[int, int]]:
    """Check that each rank's windows follow one another from step 0; the last step by run and rank."""
    if windows.empty:
        return {}
    codes, names = windows["run"].cat.codes.to_numpy(), windows["run"].cat.categories
    ranks, first, steps = (windows[name].to_numpy() for name in ("rank", "first_step", "steps"))
    width = int(ranks.max()) + 1
    key = codes.astype("int64") * width + ranks
    changes = np.flatnonzero(np.diff(key) != 0) + 1
    if len(changes) + 1 > len(np.unique(key[np.concatenate(([0], changes))])):  # a run of several attempts
        order = np.argsort(key, kind="stable")
        key, first, steps = key[order], first[order], steps[order]
        changes = np.flatnonzero(np.diff(key) != 0) + 1
    begins = np.concatenate(([0], changes))
    expected = np.empty_like(first)
    expected[1:] = first[:-1] + steps[:-1]
    expected[begins] = 0
    moved = set(segments.loc[~segments["bitwise"], "run"])  # a rank of a world of another size starts late
    for place in np.flatnonzero(first != expected):
        run = names[key[place] // width]
        if run not in faults and not (run in moved and place in begins):
            faults[run].append(
                f"rank {key[place] % width} has a window from step {first[place]}, must be from step "
                f"{expected[place]}: records are missing, doubled or out of order"
            )
    last = np.concatenate((changes, [len(key)])) - 1
    ends: dict[str, dict[int, int]] = defaultdict(dict)
    for place in last:
        ends[names[key[place] // width]][int(key[place] % width)] = int(first[place] + steps[place])
    return ends


def _of_outcome(files: RunFiles) -> Iterator[str]:
    """The outcome and `result.json`."""
    outcome, world_size = files.outcome, files.folder.cell().world_size
    if outcome is None:
        return
    if outcome.ended_at < outcome.started_at:
        yield f"outcome.json: ended_at={outcome.ended_at} is before started_at={outcome.started_at}"
    ranks = [one.rank for one in outcome.ranks]
    if ranks and (len(set(ranks)) < len(ranks) or max(ranks) >= world_size):
        yield f"outcome.json: ranks are {ranks}, must be different and below {world_size}"
    if outcome.state != "COMPLETED":
        if outcome.reached_target is not None:
            yield f"outcome.json: state={outcome.state}, but reached_target={outcome.reached_target}"
        return
    bad = [one.rank for one in outcome.ranks if one.exit_code != 0 or one.signal is not None]
    if bad:
        yield f"outcome.json: state=COMPLETED, but rank {bad[0]} did not exit with 0"
    if outcome.stop_reason not in ("target", "epochs", "diverged"):
        yield f"outcome.json: state=COMPLETED, but stop_reason={outcome.stop_reason!r}"
    if outcome.reached_target is None or outcome.train_seconds is None or outcome.value is None:
        yield "outcome.json: state=COMPLETED, but reached_target, train_seconds or value is missing"
    result = files.result
    if result is not None:
        for name in ("reached_target", "stop_reason", "train_seconds", "value"):
            ours, theirs = getattr(outcome, name), getattr(result, name)
            if ours is not None and ours != theirs and not _both_nan(ours, theirs):
                yield f"outcome.json: {name}={ours}, but result.json has {theirs}"


def _of_history(history: History, files: RunFiles) -> Iterator[str]:
    """Evaluations: one target, and clocks that do not run backwards."""
    target = files.folder.cell().target
    for name, wanted in (("metric", target.metric), ("direction", target.direction)):
        other = history[name][history[name] != wanted]
        if len(other):
            yield f"an evaluation has {name}={other[0]!r}, the cell's target has {wanted!r}"
    steps = history["step"]
    back = np.flatnonzero(np.diff(steps) <= 0)
    if len(back):
        yield f"evaluations of steps {steps[back[0]]:g} and {steps[back[0] + 1]:g} follow one another"
    for name in CLOCKS:
        values = history[name]
        back = np.flatnonzero(np.diff(values) < 0)
        if len(back):
            yield f"{name} of evaluations goes back from {values[back[0]]:g} to {values[back[0] + 1]:g}"


def _of_metrics(history: History) -> Iterator[str]:
    """All metrics of an evaluation: the target's is among them, with the same value."""
    for name, value, measured in zip(history["metric"], history["value"], history["metrics"], strict=True):
        again = measured.get(name)
        if measured and again != value and not _both_nan(again, float(value)):
            yield f"an evaluation has value={value:g} of {name}, but metrics have {again}"


def _of_segments(starts: pd.DataFrame) -> Iterator[str]:
    """Starts: numbered upwards on every rank."""
    for rank, rows in starts.groupby("rank"):
        numbers = rows["segment"].tolist()
        if any(later <= earlier for earlier, later in pairwise(numbers)):
            yield f"rank {rank} has segments {numbers}, must be numbered upwards"


def _of_completion(files: RunFiles, ends: Mapping[int, int], history: History | None) -> Iterator[str]:
    """A completed run: records of every rank up to the last evaluation, and what it says is the outcome's."""
    world_size = files.folder.cell().world_size
    missing = [rank for rank in range(world_size) if rank not in ends]
    if missing:
        yield f"state=COMPLETED, but rank {_listed(missing)} has no windows"
    if any(rank >= world_size for rank in ends):
        yield f"records of rank {max(ends)} in a world of {world_size}"
    if history is None:
        yield "state=COMPLETED, but there is no evaluation"
        return
    last = {name: float(history[name][-1]) for name in ("step", "value", "train_seconds")}
    other = {rank: end for rank, end in ends.items() if end != last["step"]}
    if other:
        rank, end = next(iter(other.items()))
        yield f"rank {rank}'s windows end at step {end}, the last evaluation is of step {last['step']:g}"
    if files.result is not None and files.result.steps != last["step"]:
        yield f"result.json: steps={files.result.steps}, the last evaluation is of step {last['step']:g}"
    yield from _of_last_evaluation(files, last)


def _of_last_evaluation(files: RunFiles, last: Mapping[str, float]) -> Iterator[str]:
    outcome, target = files.outcome, files.folder.cell().target
    assert outcome is not None  # noqa: S101  of a completed run
    for name in ("value", "train_seconds"):
        ours, theirs = getattr(outcome, name), last[name]
        if ours is not None and not _both_nan(ours, theirs) and not _close(ours, theirs):
            yield f"outcome.json: {name}={ours}, but the last evaluation has {theirs}"
    value = last["value"]
    reached = target.reached_by(value) and outcome.stop_reason != "diverged"
    if outcome.reached_target is not None and outcome.reached_target != reached:
        yield f"outcome.json: reached_target={outcome.reached_target}, but the last value is {value:g}"
    if outcome.stop_reason == "target" and not reached:
        yield f"outcome.json: stop_reason='target', but the last value is {value:g}"


def _close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=_TOLERANCE) or one == other


def _both_nan(one: Any, other: Any) -> bool:
    return all(isinstance(value, float) and math.isnan(value) for value in (one, other))


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
