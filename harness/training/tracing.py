"""Sampled steps of a window as one record: when each phase of each of them began, and how long it took."""

from __future__ import annotations

import socket
import time

from harness.runs.records import TraceRecord
from kfac_core.timing.timer import PhaseTimer


def trace_record(timer: PhaseTimer, rank: int, segment: int) -> TraceRecord | None:
    """What the timer kept since the last call, on the host's Unix clock; None if no step was sampled."""
    spans = timer.drain_spans()
    if not spans:
        return None
    first = spans[0].started
    began = time.time() - (time.perf_counter() - first)
    told = tuple((span.step, span.phase, span.started - first, span.seconds, span.layer) for span in spans)
    return TraceRecord(rank, segment, socket.gethostname(), began, told)
