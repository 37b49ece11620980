"""Sampled steps in the Trace Event Format of Chrome, which Perfetto and chrome://tracing show.

One process a rank, one complete event a stretch of a phase, on one timeline: Unix time. Ranks of one host
share a clock; between hosts the timeline is as good as their clocks agree.
Source: "Trace Event Format", Google, complete events (`ph: X`) and metadata events (`ph: M`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from harness.errors import UserError
from harness.runs.effective_records import effective_records
from harness.runs.store import Attempt


def chrome_trace(attempts: Sequence[Attempt]) -> str:
    """The traced steps of all ranks of the attempts, as JSON.

    Raises:
        UserError: none of them recorded any.
    """
    events: list[dict[str, Any]] = []
    process = 0
    for attempt in attempts:
        for rank in range(attempt.cell_folder.cell().world_size):
            found = _events(attempt, rank, process)
            if found:
                name = f"{attempt.cell_folder.id} rank {rank}"
                events += [_about("process_name", process, name=name), *found]
                events.append(_about("process_sort_index", process, sort_index=process))
                process += 1
    if not events:
        raise UserError(
            "no step of these runs was traced; set traced_steps: [20, 30] in the site's profile, which "
            "samples those steps of every run that starts there"
        )
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"


def _events(attempt: Attempt, rank: int, process: int) -> list[dict[str, Any]]:
    events = []
    for record in effective_records(attempt, rank):
        if record["kind"] == "trace":
            for step, phase, start, seconds, *layer in record["spans"]:
                at = record["started_at"] + start
                said = {"step": step, "host": record["host"], "layer": "".join(layer)}
                events.append({
                    "name": phase, "cat": "phase", "ph": "X", "ts": at * 1e6, "dur": seconds * 1e6,
                    "pid": process, "tid": 0, "args": said,
                })  # fmt: skip
    return events


def _about(what: str, process: int, **said: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "ts": 0, "pid": process, "tid": 0, "args": said}
