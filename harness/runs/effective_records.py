"""Which records of a run count: a resumed run repeats the steps after its checkpoint.

Every start of a run is a segment (see `SegmentRecord`). A record counts if its last step is at most the limit
of its segment: the earliest step at which a later segment began.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from harness.runs.record_lines import parse, read_content, read_head, whole_lines
from harness.runs.records import DeviceRecord, EvalRecord, PhaseRecord, Record, SegmentRecord, TraceRecord
from harness.runs.store import Attempt


def effective_evaluations(attempt: Attempt) -> list[dict[str, Any]]:
    """The evaluations of the run that count, oldest first."""
    return [record for record in effective_records(attempt, 0) if record["kind"] == EvalRecord.KIND]


def effective_records(attempt: Attempt, rank: int) -> list[dict[str, Any]]:
    """The records of one rank that count, over all attempts of the run, in the order written.

    Raises:
        StoredFileError: one of its files is damaged.
    """
    segment, first_steps = 0, {}
    records: list[tuple[int, dict[str, Any]]] = []
    for record in _records(attempt, rank):
        if isinstance(record, SegmentRecord):
            segment += 1
            first_steps[segment] = record.first_step
        records.append((segment, {"kind": record.KIND, **vars(record)}))
    limits = segment_limits(first_steps)
    return [one for segment, one in records if last_step(one["kind"], one) <= limits.get(segment, math.inf)]


def segment_limits(first_steps: Mapping[int, int]) -> dict[int, int]:
    """Limits by segment; a segment that is missing here has none.

    Args:
        first_steps: the step at which each segment of one run began, by segment.
    """
    return {
        segment: min(step for later, step in first_steps.items() if later > segment)
        for segment in range(max(first_steps, default=0))
    }


def last_step(kind: str, record: Any) -> Any:
    """Steps that the run had taken at the end of what a record is about; 0 for kinds that always count.

    Args:
        kind: the record's kind.
        record: its fields, or a data frame of records of this kind.
    """
    if kind in (PhaseRecord.KIND, DeviceRecord.KIND):
        return record["first_step"] + record["steps"]
    if kind == EvalRecord.KIND:
        return record["step"]
    if kind == TraceRecord.KIND:
        return max((step + 1 for step, *_ in record["spans"]), default=0)
    return 0


def _records(attempt: Attempt, rank: int) -> Iterator[Record]:
    for one in reversed(attempt.lineage()):
        path = one.records(rank)
        try:
            content, _ = read_content(path)
        except FileNotFoundError:
            continue
        for number, text in enumerate(whole_lines(content), start=1):
            record = parse(read_head(text, path, number), path)
            if record is not None:
                yield record
