"""Checkpoints of an attempt: who requests them, and where they are. One folder a step, published by a rename.

checkpoints/step-00000120/manifest.json     written last: sizes and checksums of all parts
                          shared.pt         state that is equal on all ranks, written by rank 0
                          rank-00000.pt     state of this rank only
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from harness.errors import StoreError
from harness.runs.records import SegmentRecord
from harness.runs.store import Attempt
from harness.runs.stored_files import (
    STRICT,
    Count,
    Positive,
    Seconds,
    read_as,
    read_bytes,
    with_checksum,
    write_atomically,
)  # fmt: skip

KEPT = 2  # the newest, and one to fall back on if the newest is damaged

FORMAT_VERSION = 1

PREEMPTED_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: saved, to be resumed

_ALWAYS = (signal.SIGUSR1, signal.SIGUSR2)  # sent before a time limit by submitit and most sites

_MANIFEST = "manifest.json"
_STEP = re.compile(r"step-[0-9]{8,}")


@dataclass(frozen=True)
class Request:
    """A request for a checkpoint.

    Attributes:
        reason: `interval`, or the name of the signal.
        stops: whether the run ends after it.
    """

    reason: str
    stops: bool


class SignalRequests:
    """Turns a signal into a request to save and stop; only for the main thread of a rank.

    Inside a Slurm job SIGTERM is such a request, because preemption sends it and sends SIGKILL only after the
    partition's grace time. Elsewhere launchers send SIGTERM to end a rank at once.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        numbers = (*_ALWAYS, signal.SIGTERM) if "SLURM_JOB_ID" in os.environ else _ALWAYS
        for number in numbers:
            signal.signal(number, self._on_signal)

    def __call__(self) -> Request | None:
        """The request received so far, if any."""
        number = self._number
        return None if number is None else Request(signal.Signals(number).name, stops=True)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._number = number  # nothing else: a lock could be held by the code that this interrupts


@dataclass(frozen=True)
class PartSum:
    """Size and checksum of a file's content."""

    __pydantic_config__ = STRICT
    size_bytes: Count
    crc32: Count


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        step: the first step of a run that is resumed from it.
        segment: the segment of the run that saved it.
        reason: what requested it.
        saved_at: Unix time, seconds.
        parts: by file name.
    """

    __pydantic_config__ = STRICT
    version: Positive
    step: Count
    world_size: Positive
    segment: Count
    reason: str
    saved_at: Seconds
    parts: Mapping[str, PartSum]


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    path: Path

    @property
    def step(self) -> int:
        """The first step of a run that is resumed from it."""
        return int(self.path.name.removeprefix("step-"))

    def manifest(self) -> Manifest:
        """Sizes and checksums of its parts.

        Raises:
            StoredFileError: the manifest is damaged.
            OSError: it cannot be read.
        """
        return read_as(Manifest, self.path / _MANIFEST)


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one attempt."""

    attempt: Attempt

    @property
    def folder(self) -> Path:
        """Folder of the checkpoints."""
        return self.attempt.path / "checkpoints"

    def newest_first(self) -> list[Saved]:
        """Complete checkpoints; damage is found only when they are read."""
        found = [Saved(path.parent) for path in self.folder.glob(f"step-*/{_MANIFEST}")]
        found = [saved for saved in found if _STEP.fullmatch(saved.path.name)]
        return sorted(found, key=lambda saved: -saved.step)

    def saved(self, step: int) -> Saved:
        """The checkpoint of `step`, whether it exists or not."""
        return Saved(self.folder / f"step-{step:08}")

    def begin(self, step: int) -> Path:
        """Make an empty folder for the parts, and delete incomplete checkpoints."""
        self.folder.mkdir(exist_ok=True)
        for incomplete in self.folder.glob(".step-*"):
            shutil.rmtree(incomplete)
        folder = self._unfinished(step)
        folder.mkdir()
        return folder

    def publish(self, step: int, manifest: Manifest) -> Saved:
        """Publish the checkpoint begun for `step`, then delete all but the newest `KEPT`.

        Raises:
            OSError: it could not be completed; older checkpoints are unchanged.
        """
        unfinished = self._unfinished(step)
        write_atomically(unfinished / _MANIFEST, with_checksum(asdict(manifest)))
        _sync_folder(unfinished)
        saved = self.saved(step)
        if saved.path.exists():  # it was damaged, and the run has reached this step again
            shutil.rmtree(saved.path)
        unfinished.rename(saved.path)
        _sync_folder(self.folder)
        for old in self.newest_first()[KEPT:]:
            shutil.rmtree(old.path)
        return saved

    def abandon(self, step: int) -> None:
        """Delete the parts written for `step`, which may have filled the disk."""
        shutil.rmtree(self._unfinished(step), ignore_errors=True)

    def clear(self) -> None:
        """Delete all checkpoints."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def part(self, step: int, name: str) -> Path:
        """Path to which a part of the checkpoint begun for `step` is written."""
        return self._unfinished(step) / name

    def _unfinished(self, step: int) -> Path:
        return self.folder / f".step-{step:08}"


def resumable(attempt: Attempt) -> list[tuple[Attempt, Saved]]:
    """Checkpoints from which `attempt` may resume, each with the attempt that saved it; best first."""
    return [(one, saved) for one in attempt.lineage() for saved in CheckpointStore(one).newest_first()]


def kept_step(attempt: Attempt) -> int | None:
    """The step at which a retry of `attempt` would resume; None if from the beginning, or if not known."""
    try:
        return next((saved.step for _, saved in resumable(attempt)), None)
    except StoreError:  # of an attempt before it: whoever resumes the run gets the reason
        return None


def clear_checkpoint_stores(attempt: Attempt) -> None:
    """Delete all checkpoints of the completed run that ended with `attempt`."""
    for one in attempt.lineage():
        CheckpointStore(one).clear()


def past_segments(attempt: Attempt) -> int:
    """Number of earlier starts of the run that `attempt` continues, from rank 0's records."""
    marker = f'"kind": "{SegmentRecord.KIND}"'.encode()
    files = [one.records(0) for one in attempt.lineage()]
    texts = [read_bytes(file) for file in files if file.exists()]
    return sum(marker in line for text in texts for line in text.splitlines())


def _sync_folder(folder: Path) -> None:
    """Write a folder's entries to disk, which makes a rename in it durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
