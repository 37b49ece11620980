"""What a folder of runs has: attempts, their identities and the files that are worth keeping."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from harness.cell import NAME_PATTERN
from harness.errors import StoreError
from harness.runs.collected import NAME as MARK
from harness.runs.store import Attempt, CellFolder, SweepFolder
from harness.runs.stored_files import read_object

LOGS = "logs"

# Not kept: checkpoints, which are large; locks, requests and reserves; the secret of the rendezvous.
_KEPT = re.compile(r"[a-z_]+\.json|rank-[0-9]{5,9}(?:\.jsonl|\.pulse|\.end)")
_LEFT = {MARK, "rendezvous.json"}
_WRITTEN_LATER = "job_id"  # of launch.json: a queue adds it after it has submitted the attempt


class Stamp(NamedTuple):
    """Size and time of a file; equal stamps mean that it was not written in between."""

    bytes: int
    mtime_ns: int


@dataclass(frozen=True)
class StoredAttempt:
    """An attempt as it is in one of the folders."""

    attempt: Attempt

    @property
    def number(self) -> int:
        """1 for the first of the cell."""
        return self.attempt.number

    @cached_property
    def ended(self) -> bool:
        """Whether it has an outcome."""
        return (self.attempt.path / "outcome.json").exists()

    @cached_property
    def begun(self) -> bool:
        """Whether its ranks were started, or it ended before that."""
        return self.ended or (self.attempt.path / "begun.json").exists()

    @cached_property
    def launch(self) -> Mapping[str, Any]:
        """`launch.json`; empty if it has none.

        Raises:
            StoredFileError: it is damaged.
        """
        return self.attempt.read("launch.json") or {}

    @cached_property
    def identity(self) -> str:
        """A name that no other attempt has: `id` in `launch.json`; of older versions its checksum.

        Raises:
            StoredFileError: `launch.json` is damaged.
        """
        if self.launch.get("id") is not None:
            return str(self.launch["id"])
        kept = {key: value for key, value in self.launch.items() if key != _WRITTEN_LATER}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]

    def stamps(self, *, logs: bool) -> dict[str, Stamp]:
        """The files that are kept, by path in the attempt's folder; `outcome.json` last."""
        found = dict(_files(str(self.attempt.path), ""))
        if logs:
            found |= dict(_files(f"{self.attempt.path}/{LOGS}", f"{LOGS}/"))
        if not self.ended:  # it ended after this was asked: what was listed before may be incomplete
            found.pop("outcome.json", None)
        return dict(sorted(found.items(), key=lambda item: (item[0] == "outcome.json", item[0])))


def sweeps_in(source: Path) -> list[SweepFolder]:
    """The sweeps of a folder of runs, or the one whose folder it is.

    Raises:
        StoreError: there is none.
    """
    if not source.is_dir():
        raise StoreError(f"{source} is not a folder; give a folder of runs, or that of one sweep")
    if SweepFolder(source).holds_cells():
        return [SweepFolder(source)]
    below = (SweepFolder(path) for path in sorted(source.iterdir()) if path.is_dir())
    found = [sweep for sweep in below if not sweep.path.name.startswith(".") and sweep.holds_cells()]
    if not found:
        raise StoreError(f"{source} holds no runs; give a folder of runs, or that of one sweep")
    return found


def sweep_name(sweep: SweepFolder) -> str:
    """The name of the sweep, as its first cell has it: the folder may have been renamed.

    Raises:
        StoreError: it is not the name of a sweep.
    """
    first = next(iter(sweep.stored()))
    name = str(read_object(first.path / "cell.json").get("sweep"))
    if not re.fullmatch(NAME_PATTERN, name):
        raise StoreError(f"{first.path / 'cell.json'}: sweep={name!r} is not the name of a sweep")
    return name


def attempts_of(folder: CellFolder) -> list[StoredAttempt]:
    """The attempts of a cell, oldest first."""
    return [StoredAttempt(attempt) for attempt in folder.attempts()] if folder.path.is_dir() else []


def _files(folder: str, prefix: str) -> Iterator[tuple[str, Stamp]]:
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        kept = entry.name.endswith(".log") if prefix else _KEPT.fullmatch(entry.name)
        if not kept or entry.name in _LEFT or not entry.is_file(follow_symlinks=False):
            continue
        state = entry.stat(follow_symlinks=False)
        yield prefix + entry.name, Stamp(state.st_size, state.st_mtime_ns)
