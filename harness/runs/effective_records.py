"""The records of one rank of a run that count, over all the attempts and segments that it went on through."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from harness.runs.records import EvalRecord
from harness.runs.store import Attempt


def effective_evaluations(attempt: Attempt) -> list[dict[str, Any]]:
    """The run's evaluations, oldest first."""
    return [record for record in effective_records(attempt, 0) if record["kind"] == EvalRecord.KIND]


def effective_records(attempt: Attempt, rank: int) -> list[dict[str, Any]]:
    """In the order written; without what a later segment did again (see `SegmentRecord`)."""
    kept: list[dict[str, Any]] = []
    for record in _lines(attempt, rank):
        if record["kind"] == "segment":
            kept = [earlier for earlier in kept if _last_step(earlier) <= record["first_step"]]
        kept.append(record)
    return kept


def _last_step(record: dict[str, Any]) -> int:
    """Steps taken when it was written."""
    if "steps" in record:
        return int(record["first_step"] + record["steps"])
    if record["kind"] == "trace":
        return max((span[0] + 1 for span in record["spans"]), default=0)
    return int(record["step"]) if record["kind"] == "evaluation" else 0


def _lines(attempt: Attempt, rank: int) -> Iterator[dict[str, Any]]:
    for one in reversed(attempt.lineage()):
        path = one.records(rank)
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
            try:
                yield json.loads(line)
            except ValueError:
                continue  # cut short by a kill
