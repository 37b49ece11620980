"""Which step to save at: agreed on by all ranks beside the training, which no step waits for.

Ranks run ahead of each other, on GPUs by many steps. So whoever is asked announces it in the store; every
rank then promises the step that it will not go past unasked, and rank 0 names the largest of them. A thread
of each rank does the talking, twice a second; the loop compares two numbers a step. Only between a promise
and rank 0's answer, some milliseconds, may a rank wait.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Protocol

from harness.runs.checkpoint_requests import Request

POLL_SECONDS = 0.5
_ANSWER_TIMEOUT = timedelta(seconds=60)  # a peer that says nothing for so long is gone, or will be ended


class Store(Protocol):
    """What this needs of torch's TCPStore."""

    def set(self, key: str, value: str, /) -> None:
        """Publish."""

    def get(self, key: str, /) -> bytes:
        """Wait for a value, and read it."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys have values."""

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Publish if nobody has; the value that is there now."""


class Agreement:
    """One rank's side of it.

    Args:
        store: shared by all ranks and used by nobody else meanwhile; None in a world of one.
        asked: whether this rank was asked; called twice a second, in another thread.
    """

    def __init__(
        self, rank: int, world_size: int, store: Store | None, asked: Callable[[], Request | None]
    ) -> None:
        self._rank, self._world_size, self._store, self._asked = rank, world_size, store, asked
        self._lock = threading.Condition()
        self._round = 0
        self._step = -1
        self._promise: int | None = None
        self._target: int | None = None
        self._request: Request | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="checkpoint-agreement", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def at(self, step: int) -> Request | None:
        """Why all ranks save before `step`, or None if they do not; called by the loop before every step."""
        with self._lock:
            self._step = step
            if self._promise is None or step < self._promise:
                return None
            while self._target is None and self._promise is not None:
                self._lock.wait()
            return self._request if self._target == step else None

    def done(self) -> None:
        """A checkpoint is over; if it is the one that `at` asked for, listen for the next request."""
        with self._lock:
            if self._target is None or self._target != self._step:
                return  # made at an epoch's start, while the ranks are agreeing on another
            self._round += 1
            self._promise = self._target = self._request = None
            self._lock.notify_all()

    def close(self) -> None:
        """Stop listening; no rank is inside the loop any more."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        answered = -1
        while not self._closed.wait(POLL_SECONDS):
            if answered == self._round:
                continue  # agreed already; the loop is on its way to the step
            answer_to = self._round
            try:
                request = self._announced(answer_to)
                if request is not None:
                    self._settle(answer_to, request)
                    answered = answer_to
            except RuntimeError:  # torch's store: a peer did not answer in time, or rank 0 is gone
                self._give_up()
                return

    def _announced(self, number: int) -> Request | None:
        own = self._asked()
        if self._store is None:
            return own
        key = f"checkpoint/{number}/request"
        if own is not None:
            there = self._store.compare_set(key, "", json.dumps(asdict(own)))
        elif self._store.check([key]):
            there = self._store.get(key)
        else:
            return None
        return Request(**json.loads(there))

    def _settle(self, number: int, request: Request) -> None:
        with self._lock:
            promise = self._promise = self._step + 1
            self._request = request
        if self._store is None:
            target = promise
        else:
            prefix = f"checkpoint/{number}"
            self._store.set(f"{prefix}/promise/{self._rank}", str(promise))
            if self._rank == 0:
                ranks = range(self._world_size)
                promises = [int(self._store.get(f"{prefix}/promise/{rank}")) for rank in ranks]
                self._store.set(f"{prefix}/step", str(max(promises)))
            target = int(self._store.get(f"{prefix}/step"))
        with self._lock:
            self._target = target
            self._lock.notify_all()

    def _give_up(self) -> None:
        """Let the loop go on; if a peer is gone the next collective says so."""
        with self._lock:
            self._promise = None
            self._lock.notify_all()


class EveryMinutes:
    """Asks every so many minutes, on the rank that it is given to."""

    def __init__(self, minutes: float) -> None:
        self._seconds = minutes * 60
        self._last = time.monotonic()

    def __call__(self) -> Request | None:
        """A request once the time is up, until `reset`."""
        return Request("interval", stops=False) if time.monotonic() - self._last > self._seconds else None

    def reset(self) -> None:
        """Count from now on: there has been a checkpoint."""
        self._last = time.monotonic()


def own_connection(store: object) -> Store | None:
    """A connection to torch's store that a thread can wait on without holding up who else uses it."""
    clone = getattr(store, "clone", None)
    if clone is None:
        return None
    own: Store = clone()
    own.set_timeout(_ANSWER_TIMEOUT)  # type: ignore[attr-defined]  # of torch's, which carries no types
    return own
