"""Agreement of all ranks on the step to save before, without holding up training.

Ranks run ahead of each other, on GPUs by many steps. So a rank that receives a request publishes it in the
store. Every rank then proposes the next step, which it will not pass before the ranks agree, and rank 0
chooses the largest proposal. A thread of each rank communicates, twice a second; the training loop compares
two numbers a step. A rank waits only between its proposal and rank 0's choice.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta

from torch.distributed import HashStore, Store  # type: ignore[attr-defined]  # public, but hidden from checkers

from harness.runs.checkpoint_store import Request

POLL_SECONDS = 0.5
_ANSWER_TIMEOUT = timedelta(seconds=60)  # a peer that does not answer for so long is gone, or will be stopped


class Agreement:
    """One rank's side of the agreement.

    Args:
        store: torch's, shared by all ranks; None in a world of one.
        poll_request: returns a request that this rank received, if any; called twice a second, in a thread.
    """

    def __init__(
        self, rank: int, world_size: int, store: Store | None, poll_request: Callable[[], Request | None]
    ) -> None:
        self._rank, self._world_size, self._poll_request = rank, world_size, poll_request
        self._store: Store = HashStore()
        if store is not None:  # a second connection, on which a thread can wait without blocking other users
            self._store = store.clone() if hasattr(store, "clone") else store  # torch < 2.8 cannot
        self._store.set_timeout(_ANSWER_TIMEOUT)
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
                request = self._published_request(f"checkpoint/{number}/request")
                if request is not None:
                    self._agree(f"checkpoint/{number}", request)
                    last_agreed = number
            except RuntimeError:  # torch's store: a peer did not answer in time, or rank 0 is gone
                with self._condition:  # let the loop continue; if a peer is gone, the next collective fails
                    self._proposed_step = None
                    self._condition.notify_all()
                return

    def _published_request(self, key: str) -> Request | None:
        """The first request that any rank published in this round."""
        received = self._poll_request()
        if received is not None:
            return Request(**json.loads(self._store.compare_set(key, "", json.dumps(asdict(received)))))
        return Request(**json.loads(self._store.get(key))) if self._store.check([key]) else None

    def _agree(self, prefix: str, request: Request) -> None:
        with self._condition:
            proposed = self._proposed_step = self._step + 1
            self._request = request
        self._store.set(f"{prefix}/proposal/{self._rank}", str(proposed))
        if self._rank == 0:
            ranks = range(self._world_size)
            proposals = [int(self._store.get(f"{prefix}/proposal/{rank}")) for rank in ranks]
            self._store.set(f"{prefix}/step", str(max(proposals)))
        agreed = int(self._store.get(f"{prefix}/step"))
        with self._condition:
            self._agreed_step = agreed
            self._condition.notify_all()
