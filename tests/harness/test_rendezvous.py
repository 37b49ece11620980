"""Promise: only ranks of an attempt meet in its store, and no other host reaches that of a single host."""

import json
import socket
import stat
import threading

import psutil
import pytest
import torch

from harness.errors import MembershipError
from harness.launchers.address_board import VARIABLE, AddressBoard, get_address, new_secret, post_address
from harness.launchers.launch import Launch
from harness.launchers.site_profile import Site
from harness.runs.store import Attempt
from harness.training.world import World, join_world
from harness.training.world.rendezvous import is_one_host, prove_membership, rendezvous_in_folder
from tests.kfac_core.worlds import rank_context

RUN = "study/cell/attempt-1"


class Memory:
    """A store in this process."""

    def __init__(self):
        self.values, self._changed = {}, threading.Condition()

    def set(self, key, value):
        with self._changed:
            self.values[key] = value.encode()
            self._changed.notify_all()

    def get(self, key):
        with self._changed:
            assert self._changed.wait_for(lambda: key in self.values, 20), key
            return self.values[key]


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
    assert isinstance(first, MembershipError)
    assert str(first).startswith(f"ranks [1] could not prove that they belong to {RUN}")
    assert isinstance(last, MembershipError)
    assert str(last).startswith(f"the store or rank 0 could not prove that all belong to {RUN}")


def test_a_rank_0_without_the_secret_is_found_out_by_all():
    store, secret = Memory(), new_secret()
    first = _prove(store, 0, b"guess")
    _, *others = _together(first, _prove(store, 1, secret), _prove(store, 2, secret))
    assert [type(found) for found in others] == [MembershipError] * 2


class Overwritten(Memory):
    """A store in which another process acts as rank 1 at the same time."""

    def set(self, key, value):
        super().set(key, "its own" if key.endswith("/1") else value)


def test_a_rank_whose_place_another_process_takes_finds_out():
    store, secret = Overwritten(), new_secret()
    store.set("membership/challenges", "x\nits own\nx")
    (found,) = _together(_prove(store, 1, secret))
    assert str(found).startswith(f"another process acts as rank 1 of {RUN}")


@pytest.fixture
def attempt(tmp_path):
    path = tmp_path / "study" / "cell" / "attempt-1"
    path.mkdir(parents=True)
    path.chmod(0o2750)
    return Attempt(path)


def test_the_secret_of_one_host_is_its_users_and_gone_when_all_have_met(attempt):
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
    assert not published.exists()


@pytest.mark.slow
def test_a_thousand_ranks_learn_the_address_from_the_board_and_no_file_is_polled():
    secret, where = new_secret(), {"host": "node1", "port": 4711}
    with AddressBoard(secret) as board:
        found = []

        def ask():
            found.append(get_address(board.address, secret, 30))

        waiting = [threading.Thread(target=ask) for _ in range(1000)]
        for thread in waiting:
            thread.start()
        post_address(board.address, secret, where, 30)
        for thread in waiting:
            thread.join(60)
        assert found == [where] * 1000


def test_the_board_answers_nobody_without_the_secret_and_survives_bad_requests():
    secret = new_secret()
    with AddressBoard(secret) as board:
        with pytest.raises(ConnectionError, match="it is of another attempt"):
            post_address(board.address, b"guess", {"port": 1}, 30)
        host, _, port = board.address.rpartition(":")
        for request in (b"", b"\n", b"x" * 10_000):
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(request)
        with pytest.raises(TimeoutError):
            get_address(board.address, secret, 0.2)
        post_address(board.address, secret, {"port": 2}, 30)
        assert get_address(board.address, secret, 30) == {"port": 2}


def test_ranks_of_several_hosts_meet_over_the_board(attempt, monkeypatch):
    published, secret = attempt.path / "rendezvous.json", new_secret()
    with AddressBoard(secret) as board:
        monkeypatch.setenv(VARIABLE, board.address)
        published.write_text(json.dumps({"secret": secret.hex()}))
        ranks = [
            lambda rank=rank: rendezvous_in_folder(attempt, rank, 3, one_host=False) for rank in range(3)
        ]
        first, second, third = _together(*ranks)
    first.set("key", "value")
    assert [store.get("key") for store in (second, third)] == [b"value"] * 2
    assert not published.exists()


def test_ranks_that_wait_for_data_are_not_lost_peers(attempt):
    found = _together(
        *(lambda rank=rank: rendezvous_in_folder(attempt, rank, 2, one_host=True) for rank in range(2))
    )
    worlds = [
        World(rank, 2, torch.device("cpu"), "gloo", None, found[rank], staging_seconds=0.2)
        for rank in range(2)
    ]
    (late,) = _together(worlds[0].wait_for_data)
    assert str(late) == "1 of 2 ranks had no data after 0.2 s (staging_minutes)"
    assert _together(worlds[1].wait_for_data) == [None]


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
    context = rank_context("harness.training.train")
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
