"""Promise: ranks of any speed stop before the same step, and none has passed it."""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from itertools import count
from types import SimpleNamespace
from typing import ClassVar, Self

import pytest
import torch.distributed as dist

from harness.runs.checkpoint_store import Request
from harness.training.checkpoint import Checkpoints, Schedule, agreement, checkpoints
from harness.training.checkpoint.agreement import Agreement
from tests.waiting import wait_for

STOP = Request("SIGUSR1", stops=True)


@pytest.fixture(autouse=True)
def _ends_what_it_started():
    """A thread that steps on would take time from all later tests."""
    yield
    while Rank.started:
        rank = Rank.started.pop()
        rank.test_ended.set()
        rank.join(60)
        rank.agreement.close()
        assert not rank.is_alive()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(agreement, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(agreement, "_ANSWER_TIMEOUT", timedelta(seconds=1))


@pytest.fixture
def store():
    return dist.TCPStore(
        "localhost", 0, 1, is_master=True, timeout=timedelta(seconds=60), wait_for_workers=False
    )


class Rank(threading.Thread):
    """Steps at its own speed, as a GPU's host does, until it has saved often enough or the test ends."""

    started: ClassVar[list[Self]] = []

    def __init__(self, rank, world_size, store, poll_request, pause_seconds, rounds=1):
        super().__init__(daemon=True)
        self.test_ended = threading.Event()
        self.started.append(self)
        self.agreement = Agreement(rank, world_size, store, poll_request)
        self.pause_seconds, self.rounds = pause_seconds, rounds
        self.saved, self.step = [], 0

    def run(self):
        self.agreement.start()
        for self.step in count():
            if self.test_ended.is_set():
                return
            if self.agreement.request_at(self.step) is not None:
                self.saved.append(self.step)
                self.agreement.finish_round()
                if len(self.saved) == self.rounds:
                    return
            time.sleep(self.pause_seconds * random.random())  # noqa: S311  not a secret


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 5])
def test_all_ranks_save_before_the_same_steps_whichever_got_the_request(store, world_size):
    begins, rounds = time.monotonic(), 4

    def requests_of(rank):
        # a different rank gets the request in each round, and in the third all at once
        return lambda: STOP if any(
            time.monotonic() > begins + 0.1 * number and (number == 3 or rank == number % world_size)
            for number in range(1, 5)
        ) else None  # fmt: skip

    pauses = [0.0005 * 1.7**rank for rank in range(world_size)]  # they drift apart by hundreds of steps
    ranks = [Rank(r, world_size, store, requests_of(r), pauses[r], rounds) for r in range(world_size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert len(ranks[0].saved) == rounds
    assert all(rank.saved == ranks[0].saved for rank in ranks)


def test_without_a_request_no_rank_waits(store):
    rank = Rank(0, 2, store, lambda: None, 0.0)
    rank.start()
    wait_for(lambda: rank.step > 1000)
    assert rank.saved == []


def test_a_rank_waits_for_a_silent_peer_and_continues_after_a_time_out(store, monkeypatch):
    monkeypatch.setattr(agreement, "_ANSWER_TIMEOUT", timedelta(seconds=3))
    rank = Rank(0, 2, store, lambda: STOP, 0.001)
    rank.start()
    proposed = int(store.get("checkpoint/0/proposal/0"))
    wait_for(lambda: rank.step == proposed)
    time.sleep(0.1)  # in which a rank that does not wait would take many steps
    assert rank.step == proposed
    wait_for(lambda: rank.step > proposed)
    assert rank.saved == []


def test_minutes_are_counted_from_the_last_checkpoint(monkeypatch):
    now = [121.0]
    monkeypatch.setattr(checkpoints.time, "monotonic", lambda: now[0])
    saving = Checkpoints.__new__(Checkpoints)
    saving._schedule, saving._saved_at = Schedule(every_minutes=2), 2.0
    saving._world = SimpleNamespace(rank=0)
    assert saving._interval_request() is None
    now[0] = 123.0
    assert saving._interval_request() == Request("interval", stops=False)
    saving._world = SimpleNamespace(rank=1)  # rank 0 asks for all
    assert saving._interval_request() is None
