"""What the training loop asks of checkpoints: where to go on, whether to save now, and to save."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Self

from harness.runs.checkpoint_requests import Request
from harness.runs.checkpoint_store import CheckpointStore, past_segments
from harness.runs.records import CheckpointRecord, Record, SegmentRecord
from harness.runs.store import Attempt
from harness.training.all_gather import all_gather_rows
from harness.training.checkpoint.agreement import Agreement, EveryMinutes, own_connection
from harness.training.checkpoint.loading import Loaded, load_newest
from harness.training.checkpoint.saving import save_parts
from harness.training.world import World


@dataclass(frozen=True)
class Plan:
    """When to save unasked; a fact of the site's profile, as it changes no number of a run.

    Attributes:
        every_epochs: at the start of every so many epochs; None for never.
        every_minutes: when so many minutes have passed since the last one; None for never.
    """

    every_epochs: int | None = None
    every_minutes: float | None = None

    @classmethod
    def read(cls, attempt: Attempt) -> Self:
        """As the attempt's site says."""
        site = (attempt.read("launch.json") or {}).get("site") or {}
        return cls(site.get("checkpoint_every_epochs"), site.get("checkpoint_every_minutes"))


class Checkpoints:
    """One rank's part in the checkpoints of one attempt; every method but `request` is a collective call.

    Args:
        attempt: on a file system that all ranks see.
        write: where this rank's records go.
        asked: who may ask this rank to save and stop.

    Attributes:
        segment: number of the present segment; known after `load`.
    """

    def __init__(
        self,
        attempt: Attempt,
        world: World,
        write: Callable[[Record], None],
        plan: Plan,
        asked: Callable[[], Request | None] = lambda: None,
    ) -> None:
        self.segment = 0
        self._attempt, self._world, self._write, self._plan = attempt, world, write, plan
        self._shelf = CheckpointStore(attempt)
        minutes = plan.every_minutes if world.rank == 0 else None
        self._every = EveryMinutes(minutes) if minutes is not None else None
        store = own_connection(world.store) if world.store is not None else None
        self._agreement = Agreement(world.rank, world.world_size, store, lambda: asked() or self._interval())
        self._began_at = -1

    def load(self) -> Loaded | None:
        """The newest undamaged checkpoint that this attempt may go on from, the same on all ranks.

        Writes this rank's segment record, and begins to listen for requests.
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
        self._began_at = loaded.step if loaded is not None else 0
        self._agreement.start()
        return loaded

    def request(self, step: int, epoch: int, index: int) -> Request | None:
        """Why to save before `step`, which is step `index` of `epoch`; the same answer on all ranks."""
        request = self._agreement.at(step)
        every = self._plan.every_epochs
        due = every is not None and index == 0 and epoch % every == 0
        if request is None and due and step != self._began_at:
            return Request("interval", stops=False)
        return request

    def save(self, step: int, request: Request, shared: Any, own: Any) -> str:
        """Save before `step`; the checkpoints before this one stay until it is complete.

        Returns:
            Why it could not be saved, or an empty text.
        """
        began = time.perf_counter()
        about = {"segment": self.segment, "reason": request.reason}
        error, written_bytes = save_parts(self._shelf, self._world, step, about, shared, own)
        if self._world.rank == 0:
            seconds = time.perf_counter() - began
            self._write(
                CheckpointRecord(
                    0, self.segment, step, request.reason, request.stops, seconds, written_bytes, error
                )
            )
        if error:
            print(f"kronscale: no checkpoint at step {step}: {error}", flush=True)
        if self._every is not None:
            self._every.reset()
        self._agreement.done()
        return error

    def close(self) -> None:
        """Stop listening."""
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

    def _interval(self) -> Request | None:
        return self._every() if self._every is not None else None
