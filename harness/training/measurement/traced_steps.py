"""The trace record of a window: start and duration of every phase in its traced steps."""

from __future__ import annotations

import socket
import time

from harness.runs.records import TraceRecord
from kfac_core.timing.timer import PhaseTimer


def trace_record(timer: PhaseTimer, rank: int, segment: int) -> TraceRecord | None:
    """The spans since the last call, on the host's Unix clock; None if no step was traced."""
    spans = timer.drain_spans()
    if not spans:
        return None
    first = spans[0].started
    began = time.time() - (time.perf_counter() - first)
    rows = tuple((span.step, span.phase, span.started - first, span.seconds, span.layer) for span in spans)
    return TraceRecord(rank, segment, socket.gethostname(), began, rows)
