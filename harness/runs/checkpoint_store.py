"""Where an attempt's checkpoints lie: complete ones by step, each published by one rename (no torch).

checkpoints/step-00000120/manifest.json     written last: sizes and checksums of all parts
                          shared.pt         what is the same on every rank, written by rank 0
                          rank-00000.pt     what only that rank has
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.runs.records import SegmentRecord
from harness.runs.store import Attempt

KEPT = 2  # the newest, and the one to fall back on when it turns out damaged

FORMAT_VERSION = 1

_MANIFEST = "manifest.json"
_STEP = re.compile(r"step-[0-9]{8,}")


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    path: Path

    @property
    def step(self) -> int:
        """The step that a run resumed from it begins with."""
        return int(self.path.name.removeprefix("step-"))

    def manifest(self) -> dict[str, Any]:
        """What it consists of.

        Raises:
            ValueError: the manifest is damaged.
            OSError: it cannot be read.
        """
        loaded: dict[str, Any] = json.loads((self.path / _MANIFEST).read_text())
        return loaded


@dataclass(frozen=True)
class CheckpointStore:
    """The checkpoints of one attempt."""

    attempt: Attempt

    @property
    def folder(self) -> Path:
        """Where they lie."""
        return self.attempt.path / "checkpoints"

    def newest_first(self) -> list[Saved]:
        """Complete checkpoints; whether they are undamaged shows when they are read."""
        found = [Saved(path.parent) for path in self.folder.glob(f"step-*/{_MANIFEST}")]
        found = [saved for saved in found if _STEP.fullmatch(saved.path.name)]
        return sorted(found, key=lambda saved: -saved.step)

    def saved(self, step: int) -> Saved:
        """The checkpoint of `step`, there or not."""
        return Saved(self.folder / f"step-{step:08}")

    def begin(self, step: int) -> Path:
        """An empty folder to write the parts into, in place of any that was left half-written."""
        self.folder.mkdir(exist_ok=True)
        for left in self.folder.glob(".step-*"):
            shutil.rmtree(left)
        folder = self._unfinished(step)
        folder.mkdir()
        return folder

    def publish(self, step: int, manifest: Mapping[str, Any]) -> Saved:
        """Complete the checkpoint begun for `step`, then drop all but the newest `KEPT`.

        Raises:
            OSError: it could not be completed; those before it are as they were.
        """
        unfinished = self._unfinished(step)
        with (unfinished / _MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(unfinished)
        saved = self.saved(step)
        if saved.path.exists():  # passed over as damaged, and the run has come this far again
            shutil.rmtree(saved.path)
        unfinished.rename(saved.path)
        sync_folder(self.folder)
        for old in self.newest_first()[KEPT:]:
            shutil.rmtree(old.path)
        return saved

    def abandon(self, step: int) -> None:
        """Drop the parts written for `step`; frees the disk that they filled."""
        shutil.rmtree(self._unfinished(step), ignore_errors=True)

    def clear(self) -> None:
        """Drop all."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def part(self, step: int, name: str) -> Path:
        """Filter a part of the checkpoint begun for `step` is written."""
        return self._unfinished(step) / name

    def _unfinished(self, step: int) -> Path:
        return self.folder / f".step-{step:08}"


def resumable(attempt: Attempt) -> list[tuple[Attempt, Saved]]:
    """Complete checkpoints that a start of `attempt` may go on from, the best first, and whose they are."""
    return [(one, saved) for one in attempt.lineage() for saved in CheckpointStore(one).newest_first()]


def clear_checkpoint_stores(attempt: Attempt) -> None:
    """Drop all checkpoints of the completed run that `attempt` ends: nobody will go on from them."""
    for one in attempt.lineage():
        CheckpointStore(one).clear()


def past_segments(attempt: Attempt) -> int:
    """How often the run that `attempt` goes on with was started before, as rank 0's records say."""
    marker = f'"kind": "{SegmentRecord.KIND}"'
    files = [one.records(0) for one in attempt.lineage()]
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.exists()]
    return sum(marker in line for text in texts for line in text.splitlines())


def sync_folder(folder: Path) -> None:
    """Bring a folder's entries to disk: a rename is durable only then."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
