"""Clocks of the phase timer: the host's, or events on a GPU's stream."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Span:
    """An interval of one phase in a sampled step.

    Attributes:
        step: `PhaseTimer.sampled_step` at the time.
        started: seconds of the host's `time.perf_counter`; on a GPU, of the device's clock, aligned with it
            when the timer was started.
        layer: the layer, where K-FAC works layer by layer; else empty.
    """

    step: int
    phase: str
    started: float
    seconds: float
    layer: str = ""


class HostClock:
    """Books the time between marks on the open phase, by the host's clock."""

    def __init__(self) -> None:
        self._last = 0.0
        self._seconds: dict[str, float] = {}
        self.spans: list[Span] = []

    def mark(self, phase: str | None, step: int | None, layer: str) -> None:
        """Book the time since the last mark on `phase`, if any; with a step, also as a span."""
        now = time.perf_counter()
        if phase is not None:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._last
            if step is not None:
                self.spans.append(Span(step, phase, self._last, now - self._last, layer))
        self._last = now

    def finish(self, phase: str, step: int | None, layer: str) -> None:
        """The last mark before the clock stops."""
        self.mark(phase, step, layer)

    def drain(self) -> dict[str, float]:
        """Seconds by phase since the last drain."""
        seconds, self._seconds = self._seconds, {}
        return seconds


class CudaClock:
    """Records a CUDA event at every mark and reads all when the clock stops. Events are reused."""

    def __init__(self) -> None:
        self._marks: list[tuple[torch.cuda.Event, str | None, int | None, str]] = []
        self._free: list[torch.cuda.Event] = []
        self._seconds: dict[str, float] = {}
        self._started = 0.0
        self.spans: list[Span] = []

    def mark(self, phase: str | None, step: int | None, layer: str) -> None:
        """Book the time since the last mark on `phase`, if any; with a step, also as a span.

        The first mark waits for the device: work that was queued before would not be in any phase, but in the
        wall time.
        """
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        if not self._marks:
            event.synchronize()
            self._started = time.perf_counter()
        self._marks.append((event, phase, step, layer))

    def finish(self, phase: str, step: int | None, layer: str) -> None:
        """Wait for the device and read all events, so that the clock stops on host and device together."""
        self.mark(phase, step, layer)
        self._marks[-1][0].synchronize()
        now = self._started
        for (before, *_), (after, booked, sampled, of_layer) in pairwise(self._marks):
            elapsed = before.elapsed_time(after) / 1e3
            if booked is not None:
                self._seconds[booked] = self._seconds.get(booked, 0.0) + elapsed
                if sampled is not None:
                    self.spans.append(Span(sampled, booked, now, elapsed, of_layer))
            now += elapsed
        self._free += [event for event, *_ in self._marks]
        self._marks = []

    def drain(self) -> dict[str, float]:
        """Seconds by phase since the last drain."""
        seconds, self._seconds = self._seconds, {}
        return seconds
