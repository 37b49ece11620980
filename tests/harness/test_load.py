"""Promise: a window's load is the CPU time of processes that are not of the run, on its CPUs and on all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.training.measurement import load
from harness.training.measurement.load import LoadGauge, used_by

TICK = os.sysconf("SC_CLK_TCK")


class Host:
    """A `/proc` in a folder: CPUs and processes whose ticks a test sets."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cpus = {cpu: [0] * 10 for cpu in range(4)}

    def process(self, pid: int, *, user: int, children: str = "") -> None:
        task = self.folder / f"{pid}/task/{pid}"
        task.mkdir(parents=True, exist_ok=True)
        (task / "children").write_text(children)
        fields = ["S", *["0"] * 10, str(user), *["0"] * 30]  # the name may hold spaces and brackets
        (self.folder / f"{pid}/stat").write_text(f"{pid} (a (b) c) {' '.join(fields)}\n")

    def write(self) -> None:
        lines = [f"cpu{cpu} {' '.join(map(str, ticks))}" for cpu, ticks in self.cpus.items()]
        (self.folder / "stat").write_text("\n".join(["cpu 1 2 3", *lines, "intr 9"]))


@pytest.fixture
def host(tmp_path, monkeypatch):
    made = Host(tmp_path)
    monkeypatch.setattr(load, "PROC", tmp_path)
    monkeypatch.setattr(load, "CPUS", tmp_path / "cpus")
    for pid in (10, 20, 30):
        made.process(pid, user=0)
    made.write()
    return made


def test_foreign_time_is_what_the_runs_processes_did_not_use(host, monkeypatch):
    clock = iter((100.0, 102.0))
    monkeypatch.setattr(load.time, "monotonic", lambda: next(clock))
    gauge = LoadGauge({0, 1}, sharing={10}, on_host={10, 20})
    host.cpus[0][:8] = [TICK, 7, TICK // 2, 9999, 0, 50, 60, TICK // 4]  # idle time, interrupts: nobody's
    host.cpus[3][0] = 2 * TICK
    host.process(10, user=TICK // 2, children="30")
    host.process(30, user=TICK // 4)  # a loader that the rank has started
    host.process(20, user=TICK)  # another rank, on CPU 3
    host.write()
    expected = {"capacity": 4.0, "foreign": 0.75 + 7 / TICK, "steal": 0.25}
    expected |= {"host_capacity": 8.0, "host_foreign": 1.75 + 7 / TICK}
    assert gauge.read() == pytest.approx(expected)


def test_each_read_covers_the_time_since_the_last(host):
    gauge = LoadGauge({0}, sharing={10}, on_host={10})
    host.cpus[0][0] = 3 * TICK
    host.write()
    assert gauge.read()["foreign"] == 3.0
    assert gauge.read()["foreign"] == 0.0


def test_ticks_that_come_late_are_no_load_and_hide_none(host):
    gauge = LoadGauge({0}, sharing={10}, on_host={10})
    found = []
    for busy, own in [(0, 1), (2, 2), (2, 3), (4, 4), (20, 4), (20, 20), (21, 20), (23, 20)]:
        host.cpus[0][0] = busy
        host.process(10, user=own)
        host.write()
        found.append(round(gauge.read()["foreign"] * TICK))
    assert found == [0, 0, 0, 0, 16, 0, 0, 1]  # the 16 that the rank was credited later are a debt of two


def test_where_the_kernel_tells_nothing_there_is_no_load(host):
    gauge = LoadGauge({0}, sharing={10}, on_host={10})
    (host.folder / "stat").unlink()
    assert gauge.read() is None
    assert gauge.clock_mhz() is None


def test_the_clock_is_the_mean_of_the_ranks_cpus(host):
    gauge = LoadGauge({0, 2}, sharing={10}, on_host={10})
    rows = [f"processor\t: {cpu}\ncpu MHz\t\t: {1000 * (cpu + 1)}.5\n" for cpu in range(3)]
    (host.folder / "cpuinfo").write_text("\n".join(rows))
    assert gauge.clock_mhz() == 2000.5
    for cpu, khz in ((0, 2_400_000), (2, 2_600_000)):
        (host.folder / f"cpus/cpu{cpu}/cpufreq").mkdir(parents=True)
        (host.folder / f"cpus/cpu{cpu}/cpufreq/scaling_cur_freq").write_text(f"{khz}\n")
    assert gauge.clock_mhz() == 2500.0


def test_a_process_that_ends_while_its_threads_are_listed_has_no_children(host, monkeypatch):
    host.process(10, user=5, children="30")

    def glob(folder, pattern):
        raise ProcessLookupError(folder, pattern)

    monkeypatch.setattr(Path, "glob", glob)
    assert used_by(10) == 5


def test_a_living_child_counts_as_its_parents(tmp_path):
    busy = "import time\nwhile time.process_time() < 0.2: pass\nprint('done', flush=True)\ninput()"
    child = subprocess.Popen(
        [sys.executable, "-c", busy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        before = used_by(os.getpid()) - used_by(child.pid)
        assert child.stdout.readline() == "done\n"
        assert used_by(child.pid) >= 0.19 * TICK
        assert used_by(os.getpid()) - before >= 0.19 * TICK
    finally:
        child.communicate("\n")
