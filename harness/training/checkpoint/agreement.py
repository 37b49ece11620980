"""Agreement of all ranks on the step to save before, without holding up training.

Ranks run ahead of each other, on GPUs by many steps. So a rank that receives a request publishes it in the
store. Every rank then proposes the next step, which it will not pass before the ranks agree, and rank 0
chooses the largest proposal. A thread of each rank communicates, twice a second; the training loop compares
two numbers a step. A rank waits only between its proposal and rank 0's choice.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Protocol

from harness.runs.checkpoint_store import Request

POLL_SECONDS = 0.5
_ANSWER_TIMEOUT = timedelta(seconds=60)  # a peer that does not answer for so long is gone, or will be stopped


class Store(Protocol):
    """The part of torch's TCPStore that `Agreement` uses."""

    def set(self, key: str, value: str, /) -> None:
        """Publish."""

    def get(self, key: str, /) -> bytes:
        """Wait for a value, and read it."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys have values."""

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Publish if the key has no value yet; returns the present value."""


class Agreement:
    """One rank's side of the agreement.

    Args:
        store: shared by all ranks, and used for nothing else meanwhile; None in a world of one.
        poll_request: returns a request that this rank received, if any; called twice a second, in a thread.
    """

    def __init__(
        self, rank: int, world_size: int, store: Store | None, poll_request: Callable[[], Request | None]
    ) -> None:
        self._rank, self._world_size, self._store, self._poll_request = rank, world_size, store, poll_request
        self._condition = threading.Condition()
        self._round = 0
        self._step = -1
        self._proposed_step: int | None = None
        self._agreed_step: int | None = None
        self._request: Request | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="checkpoint-agreement", daemon=True)

    def start(self) -> None:
        """Start to watch for requests."""
        self._thread.start()

    def request_at(self, step: int) -> Request | None:
        """Why all ranks save before `step`, or None if they do not; call it before every step."""
        with self._condition:
            self._step = step
            if self._proposed_step is None or step < self._proposed_step:
                return None
            while self._agreed_step is None and self._proposed_step is not None:
                self._condition.wait()
            return self._request if self._agreed_step == step else None

    def finish_round(self) -> None:
        """A checkpoint is complete; if it is the agreed one, watch for the next request."""
        with self._condition:
            if self._agreed_step is None or self._agreed_step != self._step:
                return  # made at the start of an epoch, while the ranks agree on another
            self._round += 1
            self._proposed_step = self._agreed_step = self._request = None
            self._condition.notify_all()

    def close(self) -> None:
        """Stop watching; call it when the loop has ended on every rank."""
        self._closed.set()
        self._thread.join()

    def _watch(self) -> None:
        last_agreed = -1
        while not self._closed.wait(POLL_SECONDS):
            if last_agreed == self._round:
                continue  # the loop has not reached the agreed step yet
            number = self._round
            try:
                request = self._find_request(number)
                if request is not None:
                    self._agree(number, request)
                    last_agreed = number
            except RuntimeError:  # torch's store: a peer did not answer in time, or rank 0 is gone
                self._withdraw()
                return

    def _find_request(self, number: int) -> Request | None:
        """The first request that any rank published in this round."""
        own = self._poll_request()
        if self._store is None:
            return own
        key = f"checkpoint/{number}/request"
        if own is not None:
            published = self._store.compare_set(key, "", json.dumps(asdict(own)))
        elif self._store.check([key]):
            published = self._store.get(key)
        else:
            return None
        return Request(**json.loads(published))

    def _agree(self, number: int, request: Request) -> None:
        with self._condition:
            proposed = self._proposed_step = self._step + 1
            self._request = request
        if self._store is None:
            agreed = proposed
        else:
            prefix = f"checkpoint/{number}"
            self._store.set(f"{prefix}/proposal/{self._rank}", str(proposed))
            if self._rank == 0:
                ranks = range(self._world_size)
                proposals = [int(self._store.get(f"{prefix}/proposal/{rank}")) for rank in ranks]
                self._store.set(f"{prefix}/step", str(max(proposals)))
            agreed = int(self._store.get(f"{prefix}/step"))
        with self._condition:
            self._agreed_step = agreed
            self._condition.notify_all()

    def _withdraw(self) -> None:
        """Let the loop continue; if a peer is gone, the next collective fails."""
        with self._condition:
            self._proposed_step = None
            self._condition.notify_all()


class EveryMinutes:
    """Requests a checkpoint every so many minutes."""

    def __init__(self, minutes: float) -> None:
        self._seconds = minutes * 60
        self._last = time.monotonic()

    def __call__(self) -> Request | None:
        """A request once the time has passed, until `reset`."""
        return Request("interval", stops=False) if time.monotonic() - self._last > self._seconds else None

    def reset(self) -> None:
        """Count from now on, after a checkpoint."""
        self._last = time.monotonic()


def own_connection(store: object) -> Store | None:
    """A second connection to torch's store, on which a thread can wait without blocking other users."""
    clone = getattr(store, "clone", None)
    if clone is None:
        return None
    own: Store = clone()
    own.set_timeout(_ANSWER_TIMEOUT)  # type: ignore[attr-defined]  # of torch's, which carries no types
    return own
