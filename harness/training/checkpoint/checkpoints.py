"""The training loop's interface to checkpoints: resume, check for a request, save."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Self

from harness.runs.checkpoint_store import CheckpointStore, Request, past_segments
from harness.runs.records import CheckpointRecord, Record, SegmentRecord
from harness.runs.store import Attempt
from harness.training.checkpoint.agreement import Agreement, EveryMinutes, own_connection
from harness.training.checkpoint.loading import Loaded, load_newest
from harness.training.checkpoint.saving import save_parts
from harness.training.checkpoint.snapshot import restore, snapshot
from harness.training.training_state import TrainingState
from harness.training.world import World, all_gather_rows


@dataclass(frozen=True)
class Schedule:
    """When to save without a request; part of the site's profile, as it does not change a run's numbers.

    Attributes:
        every_epochs: at the start of every so many epochs; None for never.
        every_minutes: when so many minutes have passed since the last checkpoint; None for never.
    """

    every_epochs: int | None = None
    every_minutes: float | None = None

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        """The schedule of the attempt's site."""
        site = (attempt.read("launch.json") or {}).get("site") or {}
        return cls(site.get("checkpoint_every_epochs"), site.get("checkpoint_every_minutes"))


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
        self._checkpoint_store = CheckpointStore(attempt)
        minutes = schedule.every_minutes if world.rank == 0 else None
        self._interval = EveryMinutes(minutes) if minutes is not None else None
        store = own_connection(world.store) if world.store is not None else None
        self._agreement = Agreement(
            world.rank, world.world_size, store, lambda: poll_request() or self._interval_request()
        )
        self._first_step = -1

    def resume(self, state: TrainingState) -> None:
        """Restore the newest undamaged checkpoint that this attempt may resume from, the same on all ranks.

        Without one `state` stays as it is. Writes this rank's segment record and starts to watch for
        requests.
        """
        loaded, notes = load_newest(self._attempt, self._world)
        own_count = past_segments(self._attempt) if self._world.rank == 0 else 0
        self.segment = int(all_gather_rows(self._world.communicator, self._world.device, [own_count])[0][0])
        record = self._segment_record(loaded, notes)
        self._write(record)
        if self._world.rank == 0:
            self._attempt.write("segment.json", asdict(record))  # for status, which reads no long files
        for note in notes:
            print(f"kronscale: {note}", flush=True)
        self._first_step = loaded.step if loaded is not None else 0
        self._agreement.start()
        if loaded is not None:
            restore(state, loaded, self._world)

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
        error, written_bytes = save_parts(self._checkpoint_store, self._world, state.step, about, shared, own)
        if self._world.rank == 0:
            seconds = time.perf_counter() - began
            self._write(
                CheckpointRecord(
                    0, self.segment, state.step, request.reason, request.stops, seconds, written_bytes, error
                )
            )
        if error:
            print(f"kronscale: no checkpoint at step {state.step}: {error}", flush=True)
        if self._interval is not None:
            self._interval.reset()
        self._agreement.finish_round()

    def close(self) -> None:
        """Stop watching for requests."""
        self._agreement.close()

    def _segment_record(self, loaded: Loaded | None, notes: list[str]) -> SegmentRecord:
        now = time.time()
        return SegmentRecord(
            rank=self._world.rank,
            segment=self.segment,
            first_step=loaded.step if loaded is not None else 0,
            attempt=loaded.attempt if loaded is not None else None,
            started_at=now,
            away_seconds=now - loaded.saved_at if loaded is not None else 0.0,
            bitwise=loaded is None or loaded.same_world,
            notes=tuple(notes),
        )

    def _interval_request(self) -> Request | None:
        return self._interval() if self._interval is not None else None
