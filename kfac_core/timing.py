"""The phase timer: exclusive phase times that add up to the wall time, and traffic by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import torch

from kfac_core.phases import COMM_PHASES, Phase

# ------------------------------------------------------------
# Clocks of the phase timer: the host's, or events on a GPU's stream.


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

    samples = True

    def __init__(self) -> None:
        self._last = 0.0
        self._seconds: dict[str, float] = {}
        self.spans: list[Span] = []

    def step(self, kind: str, step: int | None) -> None:
        """A reading of the clock takes a tenth of a microsecond: every step is measured."""

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


OTHER = "other"

SAMPLED_EVERY = 100
"""On a GPU the phases of one step in so many are measured, for each kind of step."""


class CudaClock:
    """Records CUDA events at marks and reads them when the clock stops. Events are reused.

    An event takes the host 6 to 10 microseconds, as long as a launch. Steps that `step` announces have one,
    where they begin, which gives their seconds; the first of each kind and then one in `SAMPLED_EVERY` has
    one at every mark. The seconds of all steps of a kind are divided into phases as theirs are.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[torch.cuda.Event, str, str | None, int | None, str]] = []
        self._free: list[torch.cuda.Event] = []
        self._kind, self.samples = "", True
        self._counts: dict[str, int] = {}  # of steps, by kind, since the last drain
        self._seconds: dict[str, float] = {}  # of all steps, by kind
        self._sampled: dict[str, dict[str, float]] = {}  # of sampled steps, by kind and phase
        self._started = 0.0
        self.spans: list[Span] = []

    def step(self, kind: str, step: int | None) -> None:
        """A step of this kind begins; one that is traced is sampled too."""
        self._record(OTHER if self.samples else None, None, "")
        count = self._counts.get(kind, 0)
        self._counts[kind] = count + 1
        self._kind, self.samples = kind, count % SAMPLED_EVERY == 0 or step is not None

    def mark(self, phase: str | None, step: int | None, layer: str) -> None:
        """Book the time since the last mark on `phase`, if any; with a step, also as a span.

        The first mark waits for the device: work that was queued before would not be in any phase, but in the
        wall time.
        """
        if self.samples:
            self._record(phase, step, layer)

    def finish(self, phase: str, step: int | None, layer: str) -> None:
        """Wait for the device and read all events, so that the clock stops on host and device together."""
        self._record(phase if self.samples else None, step, layer)
        self._marks[-1][0].synchronize()
        now = self._started
        for (before, *_), (after, kind, booked, traced, of_layer) in pairwise(self._marks):
            elapsed = before.elapsed_time(after) / 1e3
            self._seconds[kind] = self._seconds.get(kind, 0.0) + elapsed
            if booked is not None:
                phases = self._sampled.setdefault(kind, {})
                phases[booked] = phases.get(booked, 0.0) + elapsed
                if traced is not None:
                    self.spans.append(Span(traced, booked, now, elapsed, of_layer))
            now += elapsed
        self._free += [event for event, *_ in self._marks]
        self._marks, self._kind, self.samples = [], "", True

    def _record(self, phase: str | None, step: int | None, layer: str) -> None:
        """End an interval of the phase, None in a step that is not sampled."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        if not self._marks:
            event.synchronize()
            self._started = time.perf_counter()
        self._marks.append((event, self._kind, phase, step, layer))

    def drain(self) -> dict[str, float]:
        """Seconds by phase since the last drain."""
        found: dict[str, float] = {}
        for kind, phases in self._sampled.items():
            measured = sum(phases.values())
            weight = self._seconds[kind] / measured if measured else 0.0
            for phase, seconds in phases.items():
                found[phase] = found.get(phase, 0.0) + weight * seconds
        self._counts, self._seconds, self._sampled = {}, {}, {}
        return found


_NOTHING: AbstractContextManager[None] = nullcontext()

Number = TypeVar("Number", int, float)


@dataclass
class Traffic:
    """Counters of what one rank passed to collectives.

    Attributes:
        calls: collectives issued.
        sent_bytes: payload bytes, without copies made inside a collective's algorithm.
        wait_seconds: time until the last peer had arrived; None where it is not measured, see
            `kfac_core.collectives.SplitWait`.
    """

    calls: int = 0
    sent_bytes: int = 0
    wait_seconds: float | None = None


@dataclass(frozen=True)
class WindowTotals:
    """Totals of a window, as `PhaseTimer.drain` returns them.

    Attributes:
        wall_seconds: host time between `start` and `stop`, measured independently of the phases.
        seconds: exclusive seconds by phase and of `other`; tests check that they add up to the wall time.
        calls: times each phase was entered; for the comm phases, collectives issued.
        sent_bytes: payload bytes by phase.
        wait_seconds: the part of `seconds` spent waiting for late ranks, by phase, where it is measured.
        entries: times any phase was entered with marks, which determines the timer's own cost.
    """

    wall_seconds: float
    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    wait_seconds: dict[str, float] = field(default_factory=dict)
    entries: int = 0

    def __add__(self, later: WindowTotals) -> WindowTotals:
        """The totals of both, for a window that was interrupted, for example by a checkpoint."""
        return WindowTotals(
            self.wall_seconds + later.wall_seconds,
            _added(self.seconds, later.seconds),
            _added(self.calls, later.calls),
            _added(self.sent_bytes, later.sent_bytes),
            _added(self.wait_seconds, later.wait_seconds),
            self.entries + later.entries,
        )


class PhaseTimer:
    """Attributes every moment between `start` and `stop` to the innermost open phase, or to `other`.

    A phase change is one mark: on a CPU a clock reading, on a GPU an event recorded on the current stream
    and read when the clock stops, so that nothing waits for the device between phases. On a GPU marks cost as
    much as launches; who calls `step` where a step begins has them in sampled steps only.

    Args:
        device: where the work runs; events are used for CUDA.
        observer: callback with the open phase after every change; the harness writes its heartbeat there.
        traffic: counters of the collectives; their increase within a phase is booked on it.
        ranges: mark every phase for profilers, with torch's `record_function` and on a GPU an NVTX range.

    Attributes:
        sampled_step: while set to a number, every interval of every phase, and of every layer in it, is also
            kept as a `Span` of that step; reset when the clock stops.
    """

    def __init__(
        self,
        device: torch.device | str = "cpu",
        observer: Callable[[str], None] | None = None,
        traffic: Traffic | None = None,
        *,
        ranges: bool = False,
    ) -> None:
        on_gpu = torch.device(device).type == "cuda"
        self._clock: HostClock | CudaClock = CudaClock() if on_gpu else HostClock()
        self._range: Callable[[str], AbstractContextManager[None]] | None = None
        if ranges:
            self._range = _nvtx_range if on_gpu else _profiler_range
        self._observer = observer
        self.traffic = traffic if traffic is not None else Traffic()
        self._booked = replace(self.traffic)
        self.sampled_step: int | None = None
        self._open = [OTHER]
        self._layer = ""
        self._running = False
        self._started = self._drained_at = 0.0
        self._wall_seconds = 0.0
        self._calls: dict[str, int] = {}
        self._sent_bytes: dict[str, int] = {}
        self._wait_seconds: dict[str, float] = {}
        self._entries = 0

    def count(self, traffic: Traffic) -> None:
        """Book the increase of these counters from now on, instead of the previous ones."""
        if traffic is not self.traffic:
            self.traffic, self._booked = traffic, replace(traffic)

    def start(self) -> None:
        """Start the clock; waits for a GPU."""
        self._clock.mark(None, self.sampled_step, self._layer)
        self._booked = replace(self.traffic)
        self._started = time.perf_counter()
        self._running = True

    def stop(self) -> None:
        """Stop the clock, for an evaluation, a checkpoint or the end of a window; waits for a GPU."""
        self._clock.finish(self._open[-1], self.sampled_step, self._layer)
        self._wall_seconds += time.perf_counter() - self._started
        self._running, self.sampled_step = False, None

    def step(self, kind: str) -> None:
        """A step begins, outside of any phase, whose phases take about as long as in others of its kind."""
        if self._running:
            self._clock.step(kind, self.sampled_step)

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Book the time of the block, without that of phases opened inside it, on `phase`."""
        if not self._running:
            yield
            return
        self._enter(phase)
        try:
            if self._range is None:
                yield
            else:
                with self._range(f"kronscale.{phase.value}"):
                    yield
        finally:
            self._leave(phase)

    def layer(self, name: str) -> AbstractContextManager[None]:
        """In sampled steps, mark the spans of the block as that layer's; else do nothing, at no cost."""
        if self.sampled_step is None or not self._running:
            return _NOTHING
        return self._within(name)

    @property
    def elapsed_seconds(self) -> float:
        """Host seconds between all starts and stops so far; read it while the clock is stopped."""
        return self._wall_seconds

    def drain_spans(self) -> list[Span]:
        """Spans of sampled steps since the last call, in order; call it while the clock is stopped."""
        spans, self._clock.spans = self._clock.spans, []
        return spans

    def drain(self) -> WindowTotals:
        """Totals since the last drain; call it while the clock is stopped."""
        if self._running:
            raise RuntimeError("drain() while the clock runs: call stop() first")
        wall_seconds = self._wall_seconds - self._drained_at
        totals = WindowTotals(
            wall_seconds,
            self._clock.drain(),
            self._calls,
            self._sent_bytes,
            self._wait_seconds,
            self._entries,
        )
        self._drained_at = self._wall_seconds
        self._calls, self._sent_bytes, self._wait_seconds, self._entries = {}, {}, {}, 0
        return totals

    @contextmanager
    def _within(self, name: str) -> Iterator[None]:
        self._clock.mark(self._open[-1], self.sampled_step, self._layer)
        before, self._layer = self._layer, name
        try:
            yield
        finally:
            self._clock.mark(self._open[-1], self.sampled_step, name)
            self._layer = before

    def _enter(self, phase: Phase) -> None:
        self._clock.mark(self._open[-1], self.sampled_step, self._layer)
        self._book_traffic(self._open[-1])
        self._entries += self._clock.samples
        if phase not in COMM_PHASES:
            self._calls[phase.value] = self._calls.get(phase.value, 0) + 1
        self._open.append(phase.value)
        if self._observer is not None:
            self._observer(phase.value)

    def _leave(self, phase: Phase) -> None:
        self._clock.mark(self._open.pop(), self.sampled_step, self._layer)
        self._book_traffic(phase.value)
        if self._observer is not None:
            self._observer(self._open[-1])

    def _book_traffic(self, phase: str) -> None:
        """Book the traffic since the last phase change; like time, it is exclusive."""
        calls = self.traffic.calls - self._booked.calls
        if calls:
            if phase in COMM_PHASES:
                self._calls[phase] = self._calls.get(phase, 0) + calls
            sent_bytes = self.traffic.sent_bytes - self._booked.sent_bytes
            self._sent_bytes[phase] = self._sent_bytes.get(phase, 0) + sent_bytes
        waited = (self.traffic.wait_seconds or 0.0) - (self._booked.wait_seconds or 0.0)
        if waited:
            self._wait_seconds[phase] = self._wait_seconds.get(phase, 0.0) + waited
        if calls or waited:
            self._booked = replace(self.traffic)


def seconds_per_entry(
    device: torch.device | str = "cpu", observer: Callable[[str], None] | None = None, entries: int = 500
) -> float:
    """Seconds to enter and leave one phase on this machine: the minimum of five rounds.

    The minimum, because other work on the machine can only add to it.
    """
    timer = PhaseTimer(device, observer)
    rounds = []
    for _ in range(5):
        timer.start()
        for _ in range(entries):
            with timer.phase(Phase.FORWARD):
                pass
        timer.stop()
        rounds.append(timer.drain().wall_seconds / entries)
    return min(rounds)


@contextmanager
def _profiler_range(name: str) -> Iterator[None]:
    with torch.profiler.record_function(name):
        yield


@contextmanager
def _nvtx_range(name: str) -> Iterator[None]:
    with torch.profiler.record_function(name), torch.cuda.nvtx.range(name):
        yield


def _added(first: dict[str, Number], second: dict[str, Number]) -> dict[str, Number]:
    return {key: first.get(key, 0) + second.get(key, 0) for key in (first | second)}
