"""Traced steps in the Trace Event Format of Chrome, for Perfetto and chrome://tracing.

A rank is a process, a span of a phase is a complete event, and the timeline is Unix time. Ranks of one host
share a clock; between hosts the timeline is as accurate as their clocks.
Source: "Trace Event Format", Google, complete events (`ph: X`) and metadata events (`ph: M`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from harness.errors import UserError
from harness.runs.record_lines import effective_records
from harness.runs.store import Attempt


def chrome_trace(attempts: Sequence[Attempt]) -> str:
    """The traced steps of all ranks of the attempts, as JSON.

    Raises:
        UserError: there is none.
    """
    events: list[dict[str, Any]] = []
    process = 0
    for attempt in attempts:
        for rank in range(attempt.cell_folder.cell().world_size):
            found = _events(attempt, rank, process)
            if found:
                label = f"{attempt.cell_folder.id} rank {rank}"
                events += [_metadata("process_name", process, name=label), *found]
                events.append(_metadata("process_sort_index", process, sort_index=process))
                process += 1
    if not events:
        raise UserError(
            "no step of these runs was traced; set traced_steps: [20, 30] in the site's profile to "
            "trace those steps of every run on that site"
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _events(attempt: Attempt, rank: int, process: int) -> list[dict[str, Any]]:
    events = []
    for record in effective_records(attempt, rank):
        if record["kind"] == "trace":
            for step, phase, start, seconds, *layer in record["spans"]:
                at = record["started_at"] + start
                arguments = {"step": step, "host": record["host"], "layer": "".join(layer)}
                events.append({
                    "name": phase, "cat": "phase", "ph": "X", "ts": at * 1e6, "dur": seconds * 1e6,
                    "pid": process, "tid": 0, "args": arguments,
                })  # fmt: skip
    return events


def _metadata(kind: str, process: int, **arguments: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "ts": 0, "pid": process, "tid": 0, "args": arguments}
