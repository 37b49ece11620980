"""Promise: phases are exclusive, add up to the wall with `other`, and traffic is booked by phase."""

import time
from types import SimpleNamespace

import pytest

from kfac_core import Phase
from kfac_core.timing.timer import PhaseTimer, Traffic


@pytest.fixture
def spin(monkeypatch):
    """Advances a fake clock, so that a busy machine has no effect."""
    now = [100.0]
    for module in ("timer", "clocks"):
        monkeypatch.setattr(f"kfac_core.timing.{module}.time", SimpleNamespace(perf_counter=lambda: now[0]))

    def spend(seconds: float) -> None:
        now[0] += seconds

    return spend


def test_phases_add_up_to_the_wall_on_the_real_clock():
    timer = PhaseTimer()
    timer.start()
    for _ in range(20):
        with timer.phase(Phase.FORWARD), timer.phase(Phase.FACTOR_COMPUTE):
            time.sleep(0.001)
    timer.stop()
    totals = timer.drain()
    assert totals.seconds["factor_compute"] >= 0.02
    assert sum(totals.seconds.values()) == pytest.approx(totals.wall_seconds, rel=0.02)


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


def test_traffic_inside_a_phase_is_booked_on_it():
    traffic = Traffic()
    timer = PhaseTimer(traffic=traffic)
    timer.start()
    with timer.phase(Phase.FACTOR_COMM):
        traffic.calls += 2
        traffic.sent_bytes += 100
    timer.stop()
    totals = timer.drain()
    assert totals.calls["factor_comm"] == 2
    assert totals.sent_bytes == {"factor_comm": 100}
    assert timer.drain().sent_bytes == {}


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
