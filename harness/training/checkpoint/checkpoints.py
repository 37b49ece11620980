"""The training loop's interface to checkpoints (resume, check for a request, save), and what they contain."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from harness.runs.checkpoint_store import CheckpointStore, Request, past_segments
from harness.runs.records import CheckpointRecord, Record, SegmentRecord
from harness.runs.store import Attempt
from harness.training.checkpoint.agreement import Agreement
from harness.training.checkpoint.parts import Loaded, load_newest, save
from harness.training.training_state import TrainingState
from harness.training.world import World
from kfac_core.timing import WindowTotals


@dataclass(frozen=True)
class Schedule:
    """When to save without a request; part of the site's profile, as it does not change a run's numbers.

    Attributes:
        every_epochs: at the start of every so many epochs; None for never.
        every_minutes: when so many minutes have passed since the last checkpoint; None for never.
    """

    every_epochs: int | None = None
    every_minutes: float | None = None


class Checkpoints:
    """One rank's part in the checkpoints of one attempt; every method but `request` is a collective call.

    Args:
        attempt: on a file system that all ranks share.
        write: writes this rank's records.
        poll_request: returns a request that this rank received, if any.

    Attributes:
        segment: number of the present segment; set by `resume`.
    """

    def __init__(
        self,
        attempt: Attempt,
        world: World,
        write: Callable[[Record], None],
        schedule: Schedule,
        poll_request: Callable[[], Request | None] = lambda: None,
    ) -> None:
        self.segment = 0
        self._attempt, self._world, self._write, self._schedule = attempt, world, write, schedule
        self._agreement = Agreement(
            world.rank, world.world_size, world.store, lambda: poll_request() or self._interval_request()
        )
        self._first_step = -1
        self._saved_at = time.monotonic()

    def resume(self, state: TrainingState) -> None:
        """Restore the newest undamaged checkpoint that this attempt may resume from, the same on all ranks.

        Without one `state` stays as it is. Writes this rank's segment record and starts to watch for
        requests.
        """
        loaded, notes = load_newest(self._attempt, self._world)
        past = past_segments(self._attempt) if self._world.rank == 0 else 0
        self.segment = self._world.all_gather(past)[0]
        now = time.time()
        record = SegmentRecord(
            rank=self._world.rank,
            segment=self.segment,
            first_step=loaded.step if loaded is not None else 0,
            attempt=loaded.attempt if loaded is not None else None,
            started_at=now,
            away_seconds=now - loaded.saved_at if loaded is not None else 0.0,
            bitwise=True,
            notes=tuple(notes),
        )
        self._write(record)
        if self._world.rank == 0:
            self._attempt.write("segment.json", asdict(record))  # for status, which reads no long files
        for note in notes:
            print(f"kronscale: {note}", flush=True)
        self._first_step = record.first_step
        self._agreement.start()
        if loaded is not None:
            restore(state, loaded, self._world.device)

    def request(self, step: int, epoch: int, index: int) -> Request | None:
        """Why to save before `step`, which is step `index` of `epoch`; the same answer on all ranks."""
        request = self._agreement.request_at(step)
        every = self._schedule.every_epochs
        due = every is not None and index == 0 and epoch % every == 0
        if request is None and due and step != self._first_step:
            return Request("interval", stops=False)
        return request

    def save(self, state: TrainingState, request: Request) -> None:
        """Save before the state's next step; earlier checkpoints stay until this one is complete.

        A checkpoint that cannot be saved is recorded and printed; training continues.
        """
        shared, own = snapshot(state, self._world.device)
        began = time.perf_counter()
        about = {"segment": self.segment, "reason": request.reason}
        store = CheckpointStore(self._attempt)
        error, written_bytes = save(store, self._world, state.step, about, shared, own)
        if self._world.rank == 0:
            seconds = time.perf_counter() - began
            self._write(
                CheckpointRecord(
                    0, self.segment, state.step, request.reason, request.stops, seconds, written_bytes, error
                )
            )
        if error:
            print(f"kronscale: no checkpoint at step {state.step}: {error}", flush=True)
        self._saved_at = time.monotonic()
        self._agreement.finish_round()

    def close(self) -> None:
        """Stop watching for requests."""
        self._agreement.close()

    def _interval_request(self) -> Request | None:
        """Rank 0's own request, when `every_minutes` have passed since the last checkpoint."""
        minutes = self._schedule.every_minutes if self._world.rank == 0 else None
        due = minutes is not None and time.monotonic() - self._saved_at > 60 * minutes
        return Request("interval", stops=False) if due else None


def snapshot(state: TrainingState, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """(shared, own): plain data and tensors, which are not copied."""
    shared = {
        "parameters": {name: p.detach() for name, p in state.model.named_parameters()},
        "optimizer": state.optimizer.state_dict(),
    }
    own = {
        "buffers": dict(state.model.named_buffers()),  # differ by rank: running statistics of its batches
        "kfac": state.kfac.state_shard() if state.kfac is not None else None,
        "random": _random_states(device),
        "loss_sum": float(state.loss_sum),
        "loss_steps": state.loss_steps,
        "rate": state.learning_rate,
        "window_start": state.window_start,
        "window": asdict(state.window),
        "clocks": state.clocks.state(),
    }
    return shared, own


def restore(state: TrainingState, loaded: Loaded, device: torch.device) -> None:
    """Restore a freshly built state, so that the run continues bit for bit; every rank calls it."""
    own = loaded.own
    with torch.no_grad():
        for name, parameter in state.model.named_parameters():
            parameter.copy_(loaded.shared["parameters"][name])
        for name, buffer in state.model.named_buffers():
            buffer.copy_(own["buffers"][name])
    state.optimizer.load_state_dict(loaded.shared["optimizer"])
    if state.kfac is not None:
        state.kfac.load_state_shard(own["kfac"])
    state.clocks.restore(own["clocks"])
    state.step = loaded.step
    state.learning_rate = own["rate"]
    state.loss_sum.fill_(own["loss_sum"])
    state.loss_steps = own["loss_steps"]
    state.window_start = own["window_start"]
    state.window = WindowTotals(**own["window"])
    _set_random_states(own["random"], device)


def _random_states(device: torch.device) -> dict[str, Any]:
    """States of Python's, NumPy's and torch's global generators, and of the device's, as plain data."""
    name, keys, *others = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *others),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def _set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Set all generators to what `_random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
