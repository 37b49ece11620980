"""Promise: ranks read each other's memory only where both can and nobody objects; a lost peer is named so."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch
from torch import Tensor

from harness.launchers.launch import Launch
from harness.launchers.ranks.outcome import _LOST_PEER
from harness.launchers.site_profile import Site
from harness.training.world import single_copy
from harness.training.world.single_copy import PeerProcess, find_readable_peers
from harness.training.world.world import _peer_finder
from kfac_core.collectives.torch_distributed import TorchCommunicator

PAYLOAD = b"what another process holds in its memory"
HOLDER = f"""
import ctypes, sys
held = ctypes.create_string_buffer({PAYLOAD!r})
print(ctypes.addressof(held), flush=True)
sys.stdin.read()
"""
STRANGER = """
import socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
    connection.connect(chr(0) + sys.argv[1])
    print(connection.recv(1))
"""


@pytest.fixture
def holder() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that is no relative of torch's, and where its payload lies."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


@pytest.fixture
def ends() -> tuple[PeerProcess, socket.socket]:
    """A peer as this rank sees it, and the other end of the connection to it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return PeerProcess(3, os.getpid(), ours, 0.2), theirs


def test_another_process_memory_is_copied_from_any_place_in_it(holder):
    process, address = holder
    out = torch.zeros(7, dtype=torch.uint8)
    single_copy.read(process.pid, address + 5, out)
    assert bytes(out.tolist()) == PAYLOAD[5:12]


def test_a_process_that_is_gone_counts_as_a_lost_peer(holder, ends):
    process, address = holder
    process.kill()
    process.wait()
    near = PeerProcess(3, process.pid, ends[1], None)
    with pytest.raises(
        ConnectionError, match=rf"rank 3, process {process.pid} .*: No such process"
    ) as caught:
        near.read(address, torch.zeros(4))
    assert _LOST_PEER.search(str(caught.value))  # so that the attempt's cause is the peer, not who noticed


def test_an_end_of_the_connection_and_silence_count_as_a_lost_peer(ends):
    near, theirs = ends
    with pytest.raises(TimeoutError, match=r"rank 3.* was silent for 0.2 s") as silent:
        near.receive(0, 0)
    theirs.close()
    with pytest.raises(ConnectionError, match=r"rank 3.* is gone") as closed:
        near.receive(0, 0)
    with pytest.raises(ConnectionError) as broken:
        near.send(0, 0)
    assert all(_LOST_PEER.search(str(caught.value)) for caught in (silent, closed, broken))


def test_messages_are_told_apart_and_keep_their_order(ends):
    near, theirs = ends
    peer = PeerProcess(2, os.getpid(), theirs, 0.2)
    for message in ((1, 0, 10), (2, 0, 20), (1, 1, 11), (1, 0, 12), (2, 0, 2**62)):
        peer.send(*message)
    asked = [(2, 0), (1, 0), (1, 1), (2, 0), (1, 0)]
    assert [near.receive(*key) for key in asked] == [20, 10, 11, 2**62, 12]
    assert not near._inbox


def test_both_may_tell_more_than_fits_before_either_hears(ends):
    """As buckets do that begin in the backward pass."""
    values = list(range(20_000))

    def exchange(peer: PeerProcess) -> list[int]:
        for value in values:
            peer.send(0, 0, value)
        return [peer.receive(0, 0) for _ in values]

    with ThreadPoolExecutor() as threads:
        received = list(threads.map(exchange, [ends[0], PeerProcess(2, os.getpid(), ends[1], 20.0)]))
    assert received == [values, values]


def test_strangers_are_turned_away_from_where_peers_connect():
    card = torch.tensor([1, os.getpid(), 0, 12345])
    listener = single_copy._listening(card, 2, ptrace_any=False)
    stranger = subprocess.Popen(
        [sys.executable, "-c", STRANGER, single_copy._name(card)[1:]], stdout=subprocess.PIPE, text=True
    )
    assert single_copy._accepted(listener, [card]) == {}
    assert stranger.communicate(timeout=120)[0] == "b''\n", "an end, and no word"
    connection = single_copy._reached(card, 7)
    [(rank, accepted)] = single_copy._accepted(listener, [card]).items()
    assert (rank, connection is not None) == (7, True)
    for end in (listener, connection, accepted):
        end.close()


def near(rank: int, world_size: int, how: str, where: int) -> tuple[list[int], bool]:
    """Whom this rank reads if something holds on rank `where` only, and whether exchanges still arrive."""
    with pytest.MonkeyPatch.context() as patch:
        if rank == where:
            break_off(patch, how)
        communicator = TorchCommunicator(find_peers=find_readable_peers)
    values = torch.zeros(world_size, 1000)
    values[rank] = rank + 1.0
    communicator.gather_parts(values.view(-1), [1000] * world_size, tuple(range(world_size)))
    everyone = torch.arange(1.0, world_size + 1)[:, None].expand_as(values)
    arrived = torch.equal(values, everyone)
    communicator.all_reduce(values)
    return sorted(communicator.readable_peers), arrived and torch.equal(values, everyone * world_size)


def break_off(patch: pytest.MonkeyPatch, how: str) -> None:
    def refuse(pid: int, address: int, out: Tensor) -> None:
        raise PermissionError(1, "Operation not permitted")

    real_name = single_copy._name
    match how:
        case "refused":
            patch.setattr(single_copy, "read", refuse)
        case "no such call":
            patch.setattr(single_copy, "_libc", None)
        case "another host":
            patch.setattr(single_copy, "_host", lambda: 1)
        case "another process":
            patch.setattr(os, "getpid", os.getppid)
        case "no way up":
            patch.setattr(single_copy, "_reached", lambda card, rank: None)
        case "no connection":
            patch.setattr(single_copy, "_name", lambda card: real_name(card) + "-lost")


@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize(
    "how",
    [
        "nothing",
        "refused",
        "no such call",
        "another host",
        "another process",
        "no connection",
        "no way up",
    ],
)
def test_ranks_are_near_where_each_reads_the_other(world, how, where):
    answers = world(3).run(near, how, where)
    assert all(arrived for _, arrived in answers)
    for rank, (found, _) in enumerate(answers):
        others = {0, 1, 2} - {rank}
        if how == "no way up":
            assert found == [other for other in sorted(others) if min(rank, other) != where]
        elif how != "nothing" and rank == where:
            assert found == []
        else:
            assert found == sorted(others if how == "nothing" else others - {where})


@pytest.mark.parametrize("ptrace_any", [False, True])
def test_yamas_restriction_is_lifted_only_if_the_site_says_so(tmp_path, monkeypatch, ptrace_any):
    class Libc:
        def __init__(self) -> None:
            self.calls: list[tuple[object, ...]] = []

        def prctl(self, *arguments: object) -> None:
            self.calls.append(arguments)

    libc, scope = Libc(), tmp_path / "ptrace_scope"
    monkeypatch.setattr(single_copy, "_libc", libc)
    monkeypatch.setattr(single_copy, "_YAMA", scope)
    for number, (value, restricted) in enumerate([(None, False), ("0", False), ("2", False), ("1", True)]):
        if value is not None:
            scope.write_text(f"{value}\n")
        card = torch.tensor([1, os.getpid(), 0, 777000 + number])
        single_copy._listening(card, 1, ptrace_any=ptrace_any).close()
        assert len(libc.calls) == (restricted and ptrace_any)


def test_a_bare_communicator_reads_nobodys_memory(world):
    assert world(2).run(bare) == [([], False), ([], False)]


def bare(rank: int, world_size: int) -> tuple[list[int], bool]:
    """Whom a communicator without a finder reads, and whether it has opened a socket to a peer for it."""
    before = set(psutil.Process().net_connections("unix"))
    communicator = TorchCommunicator()
    opened = set(psutil.Process().net_connections("unix")) - before
    return sorted(communicator.readable_peers), any("kfac-" in str(each.laddr) for each in opened)


@pytest.mark.parametrize(("fields", "reads"), [({}, True), ({"single_copy": False}, False)])
def test_the_site_decides_whether_ranks_read_each_other(fields, reads):
    launch = Launch(
        launcher="local",
        site=Site(name="here", **fields),
        cpus_per_rank=1,
        host="h",
        user="u",
        submitted_at=0.0,
    )
    assert (_peer_finder(launch) is not None) is reads
    assert not launch.site.ptrace_any
