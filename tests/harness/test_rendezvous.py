"""Promise: only ranks of an attempt meet in its store, and no other host reaches that of a single host."""

import json
import stat
import threading
from collections import defaultdict

import psutil
import pytest

from harness.errors import MembershipError
from harness.launchers.launch import Launch
from harness.launchers.site_profile import Site
from harness.runs.store import Attempt
from harness.training.world import join_world
from harness.training.world.membership import new_secret, prove_membership
from harness.training.world.rendezvous import is_one_host, rendezvous_in_folder
from tests.kfac_core.worlds import rank_context

RUN = "study/cell/attempt-1"


class Memory:
    """A store in this process."""

    def __init__(self):
        self.values, self._there = {}, defaultdict(threading.Event)

    def set(self, key, value):
        self.values[key] = value.encode()
        self._there[key].set()

    def get(self, key):
        assert self._there[key].wait(20), key
        return self.values[key]


class Exchanged(Memory):
    """A store that a stranger runs: it answers for everybody but the rank that asks."""

    def get(self, key):
        return self.values.get(key, b"0" * 64)


def _together(*calls):
    """Results or errors of calls that wait for each other."""
    found = [None] * len(calls)

    def run(index):
        try:
            found[index] = calls[index]()
        except Exception as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def _prove(store, rank, secret, *, size=3, run=RUN):
    return lambda: prove_membership(store, rank, size, secret, run)


def test_ranks_with_the_secret_prove_it():
    store, secret = Memory(), new_secret()
    assert _together(*(_prove(store, rank, secret) for rank in range(3))) == [None] * 3
    assert all(secret.hex().encode() not in value for value in store.values.values())


@pytest.mark.parametrize(
    "stranger",
    [{"secret": b"guess"}, {"run": "study/cell/attempt-2"}, {"size": 2}],
    ids=lambda one: next(iter(one)),
)
def test_every_rank_finds_out_that_one_is_a_stranger(stranger):
    store, secret = Memory(), new_secret()
    third = _prove(store, 1, **{"secret": secret, **stranger})
    first, last, _ = _together(_prove(store, 0, secret), _prove(store, 2, secret), third)
    for found in (first, last):
        assert isinstance(found, MembershipError)
        assert str(found).startswith(f"ranks [1] could not prove that they belong to {RUN}")


def test_a_store_of_a_stranger_is_found_out():
    (found,) = _together(_prove(Exchanged(), 1, new_secret()))
    assert str(found).startswith("the store and every other rank could not prove")


class Overwritten(Memory):
    """A store in which another process acts as rank 1 at the same time."""

    def set(self, key, value):
        super().set(key, "its own" if key.endswith("/1") else value)


def test_a_rank_whose_place_another_process_takes_finds_out():
    store, secret = Overwritten(), new_secret()
    for rank in (0, 2):
        store.set(f"membership/challenge/{rank}", "x")
    (found,) = _together(_prove(store, 1, secret))
    assert str(found).startswith(f"another process acts as rank 1 of {RUN}")


@pytest.fixture
def attempt(tmp_path):
    path = tmp_path / "study" / "cell" / "attempt-1"
    path.mkdir(parents=True)
    path.chmod(0o2750)
    return Attempt(path)


def _listening(port):
    connections = psutil.Process().net_connections("tcp")
    return {
        one.laddr.ip for one in connections if one.laddr.port == port and one.status == psutil.CONN_LISTEN
    }


def test_the_store_of_one_host_listens_on_loopback_and_its_secret_is_gone_when_all_have_met(attempt):
    published, seen = attempt.path / "rendezvous.json", {}

    def second():
        while not published.exists():
            pass
        seen.update(json.loads(published.read_text()), mode=stat.S_IMODE(published.stat().st_mode))
        return rendezvous_in_folder(attempt, 1, 2, one_host=True)

    first, other = _together(lambda: rendezvous_in_folder(attempt, 0, 2, one_host=True), second)
    first.set("key", "value")
    assert other.get("key") == b"value"
    assert other.clone().get("key") == b"value"
    assert (seen["host"], seen["port"], seen["mode"]) == ("127.0.0.1", first.port, 0o600)
    assert _listening(first.port) == {"127.0.0.1"}
    assert not published.exists()


def test_a_rank_that_cannot_read_the_secret_does_not_join(attempt):
    published = attempt.path / "rendezvous.json"

    def guess():
        while not published.exists():
            pass
        where = json.loads(published.read_text())
        published.write_text(json.dumps({**where, "secret": "00"}))
        return rendezvous_in_folder(attempt, 1, 2, one_host=False)

    found = _together(lambda: rendezvous_in_folder(attempt, 0, 2, one_host=False), guess)
    assert [type(error) for error in found] == [MembershipError] * 2


@pytest.mark.parametrize(
    ("launcher", "nodes", "expected"),
    [("local", None, True), ("slurm", "1", True), ("slurm", "2", False), ("slurm", None, False)],
)
def test_ranks_are_on_one_host_where_their_launcher_says_so(monkeypatch, launcher, nodes, expected):
    monkeypatch.delenv("SLURM_STEP_NUM_NODES", raising=False)
    if nodes is not None:
        monkeypatch.setenv("SLURM_STEP_NUM_NODES", nodes)
    site = Site(name="here")
    launch = Launch(launcher=launcher, site=site, cpus_per_rank=1, host="h", user="u", submitted_at=0)
    assert is_one_host(launch) is expected


def _listening_rank(path, rank, found):
    world = join_world(Attempt(path), rank, 2, rank)
    world.wait_for_all()
    connections = psutil.Process().net_connections("inet")
    found.put({one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN})
    world.wait_for_all()


@pytest.mark.ranks
def test_ranks_of_the_local_launcher_listen_on_loopback_only(attempt):
    site = Site(name="here")
    launch = Launch(launcher="local", site=site, cpus_per_rank=1, host="h", user="u", submitted_at=0)
    launch.write(attempt)
    context = rank_context()
    found = context.Queue()
    ranks = [
        context.Process(target=_listening_rank, args=(attempt.path, rank, found), daemon=True)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    assert [found.get(timeout=120) for _ in ranks] == [{"127.0.0.1"}] * 2
    for rank in ranks:
        rank.join(60)
        assert rank.exitcode == 0
