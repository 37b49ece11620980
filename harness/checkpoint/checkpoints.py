"""What the training loop asks of checkpoints: where to go on, whether to save now, and to save."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from harness.checkpoint.agreement import Agreement, EveryMinutes, own_connection
from harness.checkpoint.parts import DamagedError, Sum, read_part, sum_of, write_part
from harness.checkpoint.requests import Request
from harness.checkpoint.shelf import Saved, Shelf, past_segments, resumable
from harness.exchange import everyones
from harness.records import CheckpointRecord, Record, SegmentRecord
from harness.store import Attempt
from harness.world import World

FORMAT_VERSION = 1
_SHARED = "shared.pt"
_MOST_OFFERS = 16  # checkpoints that a resumed run looks at before it starts anew: those of eight attempts


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


@dataclass(frozen=True)
class Loaded:
    """What to go on from.

    Attributes:
        shared: what was the same on every rank.
        parts: what each rank had to itself; this rank's alone if the world size is the same, else all.
        same_world: whether the world size is the one that was saved.
    """

    step: int
    shared: Any
    parts: list[Any]
    same_world: bool
    saved_at: float
    attempt: int
    notes: list[str] = field(default_factory=list)


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
        self._shelf = Shelf(attempt)
        self._communicator = world.communicator
        minutes = plan.every_minutes if world.rank == 0 else None
        self._every = EveryMinutes(minutes) if minutes is not None else None
        store = own_connection(world.store) if world.store is not None else None
        self._agreement = Agreement(world.rank, world.world_size, store, lambda: asked() or self._interval())
        self._began_at = -1

    def load(self) -> Loaded | None:
        """The newest undamaged checkpoint that this attempt may go on from, the same on all ranks.

        Writes this rank's segment record, and begins to listen for requests.
        """
        notes: list[str] = []
        loaded = None
        for saved in self._offers():
            try:
                loaded = self._read(saved)
                reason = ""
            except DamagedError as error:
                loaded, reason = None, f": {error}"
            bad = [rank for rank, (ok,) in enumerate(self._everyones(loaded is not None)) if not ok]
            if not bad:
                break
            ranks = ", ".join(map(str, bad))
            notes.append(f"checkpoint {_place(saved)} is damaged for ranks {ranks} and passed over{reason}")
            loaded = None
        own_count = past_segments(self._attempt) if self._world.rank == 0 else 0
        self.segment = int(self._everyones(own_count)[0][0])
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
        error, written_bytes = self._save(step, request, shared, own)
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

    def close(self, *, completed: bool) -> None:
        """Stop listening; a completed run needs its checkpoints no more."""
        self._agreement.close()
        if completed and self._world.rank == 0:
            self._shelf.clear()

    def _save(self, step: int, request: Request, shared: Any, own: Any) -> tuple[str, int]:
        # Parameters are the same on every rank, if the collectives gave all ranks the same bits. That is
        # checked, and where it does not hold every rank saves its own.
        failed = _errno(lambda: self._shelf.begin(step)) if self._world.rank == 0 else 0
        rows = self._everyones(failed, sum_of(shared).crc32)
        same = len({crc32 for _, crc32 in rows}) == 1
        if not any(errno for errno, _ in rows):
            sums, errno = self._write_parts(step, shared, own, same)
            rows = self._everyones(errno, *(value for one in sums for value in (one.size_bytes, one.crc32)))
            if not any(row[0] for row in rows):
                manifest = self._manifest(step, request, rows, same)
                failed = _errno(lambda: self._shelf.publish(step, manifest)) if self._world.rank == 0 else 0
                rows = [
                    [errno, *row[1:]] for (errno,), row in zip(self._everyones(failed), rows, strict=True)
                ]
        error = "; ".join(
            f"rank {rank}: {os.strerror(int(row[0]))}" for rank, row in enumerate(rows) if row[0]
        )
        if error and self._world.rank == 0:
            self._shelf.abandon(step)
        return error, 0 if error else int(sum(sum(row[1::2]) for row in rows))

    def _write_parts(self, step: int, shared: Any, own: Any, same: bool) -> tuple[list[Sum], int]:
        """Sums of the shared part (empty unless this rank wrote it) and of the own one; an errno."""
        rank = self._world.rank
        sums = [Sum(0, 0), Sum(0, 0)]
        try:
            sums[1] = write_part(
                self._shelf.part(step, _own(rank)), own if same else {**own, "shared": shared}
            )
            if same and rank == 0:
                sums[0] = write_part(self._shelf.part(step, _SHARED), shared)
        except OSError as error:
            return sums, error.errno or -1
        return sums, 0

    def _manifest(self, step: int, request: Request, rows: list[list[float]], same: bool) -> dict[str, Any]:
        parts = {_own(rank): row[3:5] for rank, row in enumerate(rows)}
        if same:
            parts[_SHARED] = rows[0][1:3]
        return {
            "version": FORMAT_VERSION,
            "step": step,
            "cell": self._attempt.cell_folder.id,
            "world_size": self._world.world_size,
            "segment": self.segment,
            "reason": request.reason,
            "saved_at": time.time(),
            "parts": {name: asdict(Sum(int(size), int(crc32))) for name, (size, crc32) in parts.items()},
        }

    def _offers(self) -> list[Saved]:
        own: list[float] = []
        if self._world.rank == 0:
            own = [n for attempt, saved in resumable(self._attempt) for n in (attempt.number, saved.step)]
        own = [*own, *[-1.0] * (2 * _MOST_OFFERS)][: 2 * _MOST_OFFERS]
        offered = self._everyones(*own)[0]
        pairs = zip(offered[::2], offered[1::2], strict=True)
        folder = self._attempt.path.parent
        return [
            Saved(folder / f"attempt-{int(number)}" / "checkpoints" / f"step-{int(step):08}")
            for number, step in pairs
            if number > 0
        ]

    def _read(self, saved: Saved) -> Loaded:
        try:
            manifest = saved.manifest()
            sums = {name: Sum(**part) for name, part in manifest["parts"].items()}
            same_world = manifest["world_size"] == self._world.world_size
            ranks = [self._world.rank] if same_world else range(manifest["world_size"])
            version = manifest["version"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"manifest.json: {type(error).__name__} {error}") from error
        if version != FORMAT_VERSION:
            raise DamagedError(f"it is of version {version}, this one reads {FORMAT_VERSION}")
        parts = [read_part(saved.path / _own(rank), sums[_own(rank)]) for rank in ranks]
        shared = read_part(saved.path / _SHARED, sums[_SHARED]) if _SHARED in sums else parts[0]["shared"]
        attempt = Attempt(saved.path.parent.parent).number
        return Loaded(saved.step, shared, parts, same_world, manifest["saved_at"], attempt)

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

    def _everyones(self, *own: float) -> list[list[float]]:
        return everyones(self._communicator, self._world.device, own)


def _own(rank: int) -> str:
    return f"rank-{rank:05}.pt"


def _place(saved: Saved) -> str:
    return f"of step {saved.step} in {saved.path.parent.parent.name}"


def _errno(action: Callable[[], object]) -> int:
    """Zero, or what the system said when it refused."""
    try:
        action()
    except OSError as error:
        return error.errno or -1
    return 0
