"""The run folder: the path of every file of a study.

    <root>/<sweep>/<cell id>/cell.json                        the cell, written once
    <root>/<sweep>/<cell id>/attempt-1/launch.json            who launched it, where, when
                                       /environment.json      commit, versions, hosts (rank 0)
                                       /rank-00000.jsonl      records, one writer each
                                       /rank-00000.heartbeat  last step and phase
                                       /logs/rank-00000.log
                                       /outcome.json          written last

An attempt with an outcome never changes; a retry is a new attempt.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from harness.cell import NAME_PATTERN, Cell
from harness.errors import StoredFileError, StoreError
from harness.runs.attempt_outcome import Outcome
from harness.runs.heartbeat import Heartbeat, read_heartbeat
from harness.runs.stored_files import (
    make_inside,
    read_as,
    read_bytes,
    read_object,
    with_checksum,
    without_checksum,
    write_atomically,
    write_once,
)  # fmt: skip

DEFAULT_ROOT = Path("results/runs")

T = TypeVar("T")

_ATTEMPT = re.compile(r"attempt-[1-9][0-9]*")


@dataclass(frozen=True)
class Attempt:
    """The folder of one attempt at a cell."""

    path: Path

    @property
    def number(self) -> int:
        """1 for the first attempt."""
        return int(self.path.name.removeprefix("attempt-"))

    @property
    def cell_folder(self) -> CellFolder:
        """The folder of the attempt's cell."""
        return CellFolder(self.path.parent)

    def records(self, rank: int) -> Path:
        """The rank's record file."""
        return self.path / f"rank-{rank:05}.jsonl"

    def make_folder(self, name: str) -> None:
        """Make a folder with the permissions of the attempt's unless it exists."""
        with suppress(FileExistsError):
            make_inside(self.path / name)

    def make_logs(self) -> None:
        """Make the folder of the ranks' logs unless it exists."""
        self.make_folder("logs")

    def heartbeat(self, rank: int) -> Path:
        """The rank's heartbeat file."""
        return self.path / f"rank-{rank:05}.heartbeat"

    def log(self, rank: int) -> Path:
        """The rank's standard output and error."""
        return self.path / "logs" / f"rank-{rank:05}.log"

    def last_heartbeat(self, rank: int) -> Heartbeat | None:
        """The rank's last step and phase; None if it has written none."""
        path = self.heartbeat(rank)
        return read_heartbeat(path) or read_heartbeat(path.with_suffix(".pulse"))  # of older versions

    def outcome(self) -> Outcome | None:
        """How the attempt ended; None until then.

        Raises:
            StoredFileError: `outcome.json` is damaged, or of a newer version.
        """
        path = self.path / "outcome.json"
        try:
            return Outcome.from_json(read_bytes(path), path)
        except FileNotFoundError:
            return None

    def write_outcome(self, outcome: Outcome) -> bool:
        """Write the outcome unless there is one; the first writer wins.

        Returns:
            Whether this call wrote it.

        Raises:
            OSError: the disk is full, for example.
        """
        return write_once(self.path / "outcome.json", outcome.to_json())

    def lineage(self) -> list[Attempt]:
        """The attempt and earlier attempts of its run, whose checkpoints it resumes from, newest first.

        Raises:
            StoredFileError: a `launch.json` is damaged, or continues an attempt that is not an earlier one,
                or is of another run, as after copying run folders into each other.
        """
        found = [self]
        while (before := found[-1]._continued()) is not None:
            found.append(before)
        return found

    def _continued(self) -> Attempt | None:
        """The attempt that this one continues; None if it starts from the beginning."""
        launch, path = self.read("launch.json") or {}, self.path / "launch.json"
        number = launch.get("continues")
        if number is None:
            return None
        before = Attempt(self.path.parent / f"attempt-{number}")
        if type(number) is not int or not 0 < number < self.number or not before.path.is_dir():
            raise StoredFileError(
                path, f"continues={number!r}, must be the number of an attempt before {self.number}"
            )
        expected, got = launch.get("continues_id"), (before.read("launch.json") or {}).get("id")
        if launch.get("id") is not None and got != expected:  # old files have neither
            raise StoredFileError(
                path,
                f"continues={number} is the attempt with the id {expected}, but {before.path.name} beside it "
                f"has {got}: runs were copied into each other; keep them apart",
            )
        return before

    def read(self, name: str, *, checked: bool = False) -> dict[str, Any] | None:
        """A JSON file of the attempt, such as `launch.json`; None if it does not exist.

        Args:
            name: of the file.
            checked: whether it must have a checksum.

        Raises:
            StoredFileError: it does not hold one JSON object, or does not match its checksum.
        """
        try:
            return read_object(self.path / name, checked=checked)
        except FileNotFoundError:
            return None

    def read_as(self, kind: type[T], name: str, *, checked: bool = False) -> T | None:
        """A JSON file of the attempt as a dataclass or model; arguments and errors as of `read`."""
        try:
            return read_as(kind, self.path / name, checked=checked)
        except FileNotFoundError:
            return None

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a JSON file of the attempt atomically, with a checksum, which `read` and `read_as` check."""
        write_atomically(self.path / name, with_checksum(content))


@dataclass(frozen=True)
class CellFolder:
    """The folder of one cell."""

    path: Path

    @property
    def id(self) -> str:
        """The cell's id."""
        return self.path.name

    def cell(self) -> Cell:
        """The cell as it was submitted; its file is read once.

        Raises:
            StoreError: `cell.json` is missing or invalid, or the cell has another id in this version.
        """
        return self._cell

    @cached_property
    def _cell(self) -> Cell:
        try:
            path = self.path / "cell.json"
            cell = Cell.from_stored(without_checksum(read_bytes(path), path))
        except FileNotFoundError:
            raise StoreError(f"{self.path} has no cell.json: it is not a cell's folder") from None
        except ValidationError as error:
            raise StoreError(
                f"{self.path / 'cell.json'} is not a cell of this version: {error.errors()[0]['msg']}"
            ) from None
        if cell.id != self.id:  # otherwise its runs would be taken for runs of another cell
            raise StoreError(
                f"{self.path}: in this version its cell has the id {cell.id}, so another version of "
                f"Kronscale wrote it; read it with that version, or run the cell again with this one"
            )
        return cell

    def attempts(self) -> list[Attempt]:
        """All attempts, oldest first; other folders beside them, such as copies, are ignored."""
        named = (path for path in self.path.glob("attempt-*") if _ATTEMPT.fullmatch(path.name))
        found = [Attempt(path) for path in named if path.is_dir()]
        return sorted(found, key=lambda attempt: attempt.number)

    def latest(self) -> Attempt | None:
        """The newest attempt, if any."""
        attempts = self.attempts()
        return attempts[-1] if attempts else None

    def new_attempt(self) -> Attempt:
        """Make the folder of the next attempt; concurrent callers get different numbers."""
        latest = self.latest()
        number = latest.number + 1 if latest else 1
        while True:
            attempt = Attempt(self.path / f"attempt-{number}")
            try:
                make_inside(attempt.path)
            except FileExistsError:
                number += 1
            else:
                try:
                    attempt.make_logs()
                except OSError:  # without the folder the cell's last attempt is still its last
                    attempt.path.rmdir()
                    raise
                return attempt


@dataclass(frozen=True)
class SweepFolder:
    """The folder of one sweep."""

    path: Path

    def make(self, *, group_readable: bool = False) -> None:
        """Make the folder unless it exists; only its owner, or also its group, may enter it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
            if group_readable:
                self.path.chmod(0o2750)  # setgid: everything made in the folder gets its group

    def cell_folder(self, cell: Cell) -> CellFolder:
        """The folder of `cell`, whether it exists or not."""
        return CellFolder(self.path / cell.id)

    def stage(self, cell: Cell) -> CellFolder:
        """Make the cell's folder and write `cell.json`, unless they exist."""
        self.make()
        folder = self.cell_folder(cell)
        with suppress(FileExistsError):
            make_inside(folder.path)
        absent = {"trial"} if cell.trial is None else set()  # only trials have one
        write_once(folder.path / "cell.json", with_checksum(cell.model_dump(mode="json", exclude=absent)))
        return folder

    def cell_folders(self) -> Iterator[CellFolder]:
        """The folders of cells that can be read, by name; `unreadable` says which cannot."""
        return (folder for folder in self.stored() if _reason(folder) is None)

    def unreadable(self) -> list[str]:
        """Why cells cannot be read, one message for each: damaged, or of another version."""
        return [reason for reason in map(_reason, self.stored()) if reason is not None]

    def holds_cells(self) -> bool:
        """Whether there is any cell, readable or not."""
        return any(self.stored())

    def cell_folders_named(self, prefix: str) -> list[CellFolder]:
        """The folders of cells whose ids begin with `prefix`, by name; reads no cell."""
        return [folder for folder in self.stored() if folder.id.startswith(prefix)]

    def stored(self) -> Iterator[CellFolder]:
        """The folders with a cell, readable or not, by name."""
        # As text and not as paths, which take ten times as long: there may be 100,000 folders without a cell.
        top = str(self.path)
        for name in sorted(os.listdir(top)) if os.path.isdir(top) else ():  # noqa: PTH112, PTH208
            if os.path.isfile(f"{top}/{name}/cell.json"):  # noqa: PTH113
                yield CellFolder(self.path / name)


def _reason(folder: CellFolder) -> str | None:
    """Why the cell cannot be read; None if it can."""
    try:
        folder.cell()
    except StoreError as error:
        return str(error)
    return None


def sweep_folder(sweep: str, root: Path = DEFAULT_ROOT) -> SweepFolder:
    """The folder of the sweep named `sweep`, inside `root`.

    Raises:
        StoreError: it is no name of a sweep but a path, which might lead out of `root`.
    """
    if not re.fullmatch(NAME_PATTERN, sweep):
        raise StoreError(f"{sweep!r} is not the name of a sweep, a folder in {root}; paths are not taken")
    return SweepFolder(root / sweep)
