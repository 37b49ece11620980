"""Promise: phases are exclusive, add up to the wall with `other`, and traffic is booked by phase."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kfac_core import Phase
from kfac_core.timing import PhaseTimer, Traffic, WindowTotals


@pytest.fixture
def spin(monkeypatch):
    """Advances a fake clock, so that a busy machine has no effect."""
    now = [100.0]
    monkeypatch.setattr("kfac_core.timing.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def spend(seconds: float) -> None:
        now[0] += seconds

    return spend


def test_nested_phases_are_exclusive_and_add_up_to_the_wall(spin):
    timer = PhaseTimer()
    timer.start()
    spin(0.01)
    with timer.phase(Phase.FORWARD):
        spin(0.02)
        with timer.phase(Phase.FACTOR_COMPUTE):
            spin(0.03)
        spin(0.01)
    timer.stop()
    totals = timer.drain()
    assert totals.seconds["other"] == pytest.approx(0.01, abs=1e-9)
    assert totals.seconds["forward"] == pytest.approx(0.03, abs=1e-9)
    assert totals.seconds["factor_compute"] == pytest.approx(0.03, abs=1e-9)
    assert sum(totals.seconds.values()) == pytest.approx(totals.wall_seconds, rel=1e-9)


def test_time_between_stop_and_start_is_not_booked(spin):
    timer = PhaseTimer()
    timer.start()
    timer.stop()
    spin(0.02)
    timer.start()
    timer.stop()
    assert timer.drain().wall_seconds == 0.0


def test_traffic_of_an_inner_phase_is_not_booked_on_the_outer_one():
    traffic = Traffic()
    timer = PhaseTimer(traffic=traffic)
    timer.start()
    with timer.phase(Phase.UPDATE):
        with timer.phase(Phase.FACTOR_COMM):
            traffic.calls += 1
            traffic.sent_bytes += 100
        with timer.phase(Phase.INVERSE_COMM):
            pass
    timer.stop()
    totals = timer.drain()
    assert totals.calls == {"update": 1, "factor_comm": 1}
    assert totals.sent_bytes == {"factor_comm": 100}
    assert timer.drain().sent_bytes == {}


def test_an_exception_leaves_the_timer_consistent(spin):
    timer = PhaseTimer()
    timer.start()
    with pytest.raises(RuntimeError), timer.phase(Phase.FORWARD):
        raise RuntimeError
    spin(0.01)
    timer.stop()
    assert timer.drain().seconds["other"] == pytest.approx(0.01, abs=1e-9)


def test_the_observer_gets_every_open_phase():
    phases: list[str] = []
    timer = PhaseTimer(observer=phases.append)
    timer.start()
    with timer.phase(Phase.FORWARD), timer.phase(Phase.FACTOR_COMPUTE):
        pass
    assert phases == ["forward", "factor_compute", "forward", "other"]


class Device:
    """One stream of a simulated GPU: kernels queue up, and `now` is the host's clock."""

    def __init__(self) -> None:
        self.now = self.free = 100.0

    def kernel(self, seconds: float) -> None:
        self.free = max(self.free, self.now) + seconds

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        return Event(self)


class Event:
    """Reached when the device is done with what was queued before it was recorded."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = max(self.device.free, self.device.now)

    def synchronize(self) -> None:
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, later: Event) -> float:
        return 1e3 * (later.at - self.at)


@pytest.mark.parametrize("queued", [0.0, 0.5])
def test_phases_of_a_gpu_add_up_to_the_wall_also_when_it_was_busy_at_the_start(device, queued):
    timer = PhaseTimer("cuda")
    device.kernel(queued)
    timer.start()
    for _ in range(3):
        with timer.phase(Phase.FORWARD):
            device.kernel(0.02)
        with timer.phase(Phase.BACKWARD):
            device.kernel(0.03)
    timer.stop()
    totals = timer.drain()
    assert totals.wall_seconds == pytest.approx(0.15)
    assert totals.seconds == pytest.approx({"other": 0.0, "forward": 0.06, "backward": 0.09})


def window_of(timer: PhaseTimer, device: Device, *, full: int, plain: int) -> None:
    timer.start()
    for kind, count in (("full", full), ("plain", plain)):
        for _ in range(count):
            timer.step(kind)
            with timer.phase(Phase.FORWARD):
                device.kernel(0.02)
            with timer.phase(Phase.PRECONDITION):
                device.kernel(0.1 if kind == "full" else 0.01)
    timer.stop()


@pytest.fixture
def device(monkeypatch):
    made = Device()
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr("time.perf_counter", lambda: made.now)
    return made


def test_sampled_steps_divide_all_steps_of_their_kind(device):
    timer = PhaseTimer("cuda")
    window_of(timer, device, full=2, plain=250)
    totals = timer.drain()
    assert totals.seconds["precondition"] == pytest.approx(2 * 0.1 + 250 * 0.01)
    assert totals.seconds["forward"] == pytest.approx(252 * 0.02)
    assert sum(totals.seconds.values()) == pytest.approx(totals.wall_seconds)
    assert totals.entries == 2 * (1 + 3)  # steps 1, 101 and 201 of the plain ones
    assert totals.calls == {"forward": 252, "precondition": 252}


def test_seconds_are_those_of_all_steps_where_the_sampled_one_was_slower(device):
    timer = PhaseTimer("cuda")
    timer.start()
    for slow in (3, 1, 1):
        timer.step("plain")
        with timer.phase(Phase.FORWARD):
            device.kernel(slow * 0.01)
        with timer.phase(Phase.BACKWARD):
            device.kernel(slow * 0.03)
    timer.stop()
    totals = timer.drain()
    assert totals.wall_seconds == pytest.approx(0.2)
    assert totals.seconds == pytest.approx({"other": 0.0, "forward": 0.05, "backward": 0.15})


def test_other_steps_have_one_event_and_the_whole_costs_less_than_a_hundredth(device, monkeypatch):
    """Where an event takes 10 microseconds of a step of 3 ms, bound by the host."""
    recorded: list[float] = []

    def record(event: Event) -> None:
        device.now += 10e-6
        event.at = max(device.free, device.now)
        recorded.append(device.now)

    monkeypatch.setattr(Event, "record", record)
    timer = PhaseTimer("cuda")
    timer.start()
    for _ in range(100):
        timer.step("plain")
        for _ in range(30):
            with timer.phase(Phase.PRECONDITION):
                device.now += 1e-4
                device.kernel(1e-5)
    timer.stop()
    assert len(recorded) == 1 + 100 + 2 * 30 + 1
    assert timer.drain().wall_seconds <= 1.01 * 0.3


def test_a_traced_step_is_sampled(device):
    timer = PhaseTimer("cuda")
    timer.start()
    for step in range(3):
        timer.sampled_step = step if step == 1 else None
        timer.step("plain")
        with timer.phase(Phase.FORWARD):
            device.kernel(0.02)
    timer.stop()
    assert [(span.step, span.phase) for span in timer.drain_spans()] == [(1, "other"), (1, "forward")]


def test_the_parts_of_an_interrupted_window_add_up_also_where_one_lacks_a_phase():
    first = WindowTotals(1.0, {"forward": 0.5}, {"forward": 2}, {"factor_comm": 8}, {"factor_comm": 0.1}, 4)
    later = WindowTotals(2.0, {"forward": 0.25, "scale": 1.0}, {"scale": 1}, {"factor_comm": 8}, {}, 3)
    assert first + later == WindowTotals(
        3.0, {"forward": 0.75, "scale": 1.0}, {"forward": 2, "scale": 1}, {"factor_comm": 16},
        {"factor_comm": 0.1}, 7,
    )  # fmt: skip
    assert later + first == first + later
