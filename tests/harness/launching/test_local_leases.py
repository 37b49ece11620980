"""Promise: no lease is held twice, every wait ends, and the kernel frees the leases of killed processes."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from harness.errors import SiteError
from harness.launchers.local.leases import lease_folder, leased

POOL = tuple(range(4))
FORK = multiprocessing.get_context("fork")


def hold(needed, seconds, journal, name, times=1):
    for _ in range(times):
        with leased([("cpu", POOL, needed)]) as got:
            lines = [f"{time.monotonic()} take {cpu} {name}" for cpu in got[0]]
            append(journal, lines)
            time.sleep(seconds)
            append(journal, [f"{time.monotonic()} free {cpu} {name}" for cpu in got[0]])


def append(journal, lines):
    with journal.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def read(journal):
    rows = [line.split() for line in journal.read_text().splitlines()]
    return sorted((float(when), act, int(cpu), name) for when, act, cpu, name in rows)


def start(*arguments, **options):
    process = FORK.Process(target=hold, args=arguments, kwargs=options)
    process.start()
    return process


def test_supervisors_of_many_sizes_at_once_never_share_a_lease_and_all_end(tmp_path):
    journal = tmp_path / "journal"
    supervisors = [start(needed, 0.02, journal, f"g{needed}", times=5) for needed in (1, 2, 3, 4, 1, 2)]
    for supervisor in supervisors:
        supervisor.join(120)
        assert supervisor.exitcode == 0
    held = set()
    for _, act, cpu, _ in read(journal):
        if act == "take":
            assert cpu not in held
            held.add(cpu)
        else:
            held.remove(cpu)


def hold_until(ended, journal, name):
    while not ended.is_set():
        hold(1, 0.01, journal, name)


def test_a_supervisor_that_needs_many_leases_is_not_starved_by_others(tmp_path, wait_for):
    """Others take leases again and again, until it has had its own: starved, it would never get them."""
    journal, ended = tmp_path / "journal", FORK.Event()
    names = {f"narrow-{number}" for number in range(4)}
    narrow = [FORK.Process(target=hold_until, args=(ended, journal, name)) for name in names]
    for supervisor in narrow:
        supervisor.start()
    wait_for(lambda: journal.exists() and {row[3] for row in read(journal)} == names)
    wide = start(4, 0.0, journal, "wide")
    wide.join(120)
    ended.set()
    for supervisor in narrow:
        supervisor.join()
    assert wide.exitcode == 0
    assert [act for _, act, _, name in read(journal) if name == "wide"] == ["take"] * 4 + ["free"] * 4


def test_the_kernel_frees_the_leases_of_a_supervisor_killed_with_sigkill(tmp_path, wait_for):
    journal = tmp_path / "journal"
    holder = start(4, 600, journal, "dead")
    wait_for(journal.exists)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with leased([("cpu", POOL, 4)]) as got:
        assert got == [POOL]


def test_a_wait_for_leases_can_be_given_up_and_frees_the_queue_lock():
    with leased([("cpu", POOL, 3)]):
        with leased([("cpu", POOL, 2)], give_up=lambda: True) as got:
            assert got is None
        with leased([("cpu", POOL, 1)]) as got:
            assert got == [(3,)]


def test_a_lease_folder_that_others_may_write_to_is_refused():
    folder = lease_folder()
    assert folder.parent == Path(os.environ["XDG_RUNTIME_DIR"])
    folder.chmod(0o777)
    with pytest.raises(SiteError, match="0777"):
        lease_folder()
