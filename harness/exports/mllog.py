"""`:::MLLOG` lines for the tools of MLPerf Training.

Times are the start of the run plus its wall clock, which includes evaluations as MLPerf's rules require. The
time between two segments of a resumed run, waiting in a queue, is left out.
Source: mlcommons/logging, `mlperf_logging/mllog/mllog.py` and `constants.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from harness.errors import UserError
from harness.runs.record_lines import effective_records
from harness.runs.store import Attempt

Kind = Literal["INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"]


def mllog(attempts: Sequence[Attempt]) -> str:
    """The lines of each attempt, one run after the other.

    Raises:
        UserError: none of them has an evaluation.
    """
    lines = [line for attempt in attempts for line in _lines(attempt)]
    if not lines:
        raise UserError("none of these runs has an evaluation yet: there is nothing to log")
    return "".join(lines)


def _lines(attempt: Attempt) -> Iterator[str]:
    cell = attempt.cell_folder.cell()
    records = effective_records(attempt, 0)
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    if not evaluations:
        return
    began = next((one["started_at"] for one in records if one["kind"] == "segment"), 0.0)
    batch = cell.training.batch_sizes(cell.world_size)[0]
    yield _line(began, "POINT_IN_TIME", "submission_benchmark", cell.workload.name)
    yield _line(began, "POINT_IN_TIME", "submission_platform", cell.id)
    yield _line(began, "POINT_IN_TIME", "seed", cell.seed)
    yield _line(began, "POINT_IN_TIME", "global_batch_size", batch)
    yield _line(began, "POINT_IN_TIME", "opt_name", cell.optimizer.name)
    yield _line(began, "POINT_IN_TIME", "opt_base_learning_rate", cell.optimizer.lr)
    yield _line(began, "INTERVAL_START", "run_start", None)
    before, epoch = began, 0.0
    for one in evaluations:
        at = began + one["wall_seconds"]
        where = {"epoch_num": one["epoch"], "samples_count": one["samples"], "step_num": one["step"]}
        block = {"first_epoch_num": epoch, "epoch_count": one["epoch"] - epoch}
        yield _line(before, "INTERVAL_START", "block_start", None, **block)
        yield _line(at, "INTERVAL_END", "block_stop", None, **block)
        yield _line(at, "POINT_IN_TIME", "eval_accuracy", one["value"], metric=one["metric"], **where)
        before, epoch = at, one["epoch"]
    outcome = attempt.outcome()
    if outcome is not None:
        reached = outcome.state == "COMPLETED" and outcome.reached_target
        status = "success" if reached else "aborted"
        yield _line(before, "INTERVAL_END", "run_stop", None, status=status)


def _line(at: float, kind: Kind, key: str, value: Any, **metadata: Any) -> str:
    content = {
        "namespace": "", "time_ms": round(at * 1000), "event_type": kind, "key": key, "value": value,
        "metadata": {"file": "kronscale", "lineno": 0, **metadata},
    }  # fmt: skip
    return f":::MLLOG {json.dumps(content)}\n"
