"""Merges the attempts of one folder of runs into another; what differs is named and left as it is.

An attempt has an identity, and numbers count within a cell of one folder only. So a cell is merged if the two
folders have the same run of it, as far as both have it: attempts of equal number have equal identities, and
at least one is in both. Otherwise the cell was run twice, and the two runs stay apart: side by side, one
would count and the other would not, and an attempt might seem to continue the wrong one.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness.errors import StoredFileError, StoreError
from harness.runs.atomic_files import make_inside
from harness.runs.collected import Collected, is_collected
from harness.runs.collection.attempts import StoredAttempt, attempts_of, sweep_name, sweeps_in
from harness.runs.collection.copying import Copying, sha256_of, write_whole
from harness.runs.damage import damage
from harness.runs.locks import exclusive
from harness.runs.store import Attempt, CellFolder, sweep_folder
from harness.runs.stored_files import read_bytes, read_object


@dataclass
class Merged:
    """What became of a folder's attempts; each is named `<sweep>/<cell>/attempt-<k>`.

    Attributes:
        cells: how many the folder has.
        new: were copied.
        refreshed: were copied again, because they had not ended the last time.
        present: were there already.
        running: of the copied ones, those that have not ended.
        not_begun: are pending, and were not copied.
        differing: one sentence for each cell or attempt that is another one here.
        damaged: one sentence for each attempt that does not match its own checksums.
    """

    sweep: str
    cells: int = 0
    new: list[str] = field(default_factory=list)
    refreshed: list[str] = field(default_factory=list)
    present: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    not_begun: list[str] = field(default_factory=list)
    differing: list[str] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)


def merge(source: Path, runs: Path, how: Copying, only: Sequence[str] = ()) -> list[Merged]:
    """Copy every attempt that `source` has and `runs` has not.

    Args:
        source: a folder of runs, or that of one sweep.
        runs: the folder of runs to merge into; is made if it does not exist.
        how: how files are copied.
        only: names of sweeps; all if there are none.

    Returns:
        What became of each sweep.

    Raises:
        StoreError: the source holds no runs or not these sweeps, or is the target.
    """
    sweeps = [(sweep_name(sweep), sweep) for sweep in sweeps_in(source)]
    names = {name for name, _ in sweeps}
    if unknown := [name for name in only if name not in names]:
        raise StoreError(f"{how.source} has no sweep {unknown[0]!r}; it has {', '.join(sorted(names))}")
    merged = []
    for name, sweep in sweeps:
        if only and name not in only:
            continue
        target = sweep_folder(name, runs)
        if target.path.resolve() == sweep.path.resolve():
            raise StoreError(
                f"{how.source} is the folder of runs itself; name another one, or another --runs"
            )
        target.make()
        with exclusive(target.path / "submit.lock"):
            found = Merged(name)
            for folder in sweep.stored():
                found.cells += 1
                _Cell(folder, CellFolder(target.path / folder.id), how, found).merge()
            if found.new or found.refreshed:
                os.sync()  # once for all files
            merged.append(found)
    return merged


@dataclass(frozen=True)
class _Cell:
    """One cell of both folders."""

    source: CellFolder
    target: CellFolder
    how: Copying
    found: Merged

    def merge(self) -> None:
        theirs = [one for one in attempts_of(self.source) if self._has_begun(one)]
        ours = {one.number: one for one in attempts_of(self.target)}
        if not theirs:
            return
        if all(one.number in ours and self._unchanged(one, ours[one.number]) for one in theirs):
            self.found.present += map(self._name, theirs)
            self._add_cell_file(None)
            return
        try:
            cell = read_object(self.source.path / "cell.json")
            self._refuse_other(cell, theirs, ours)
        except StoredFileError as error:
            self.found.differing.append(str(error))
            return
        for one in theirs:
            self._merge_attempt(one, ours, cell)
        self._add_cell_file(ours)

    def _has_begun(self, one: StoredAttempt) -> bool:
        if not one.begun:
            self.found.not_begun.append(self._name(one))
        return one.begun

    def _name(self, one: StoredAttempt) -> str:
        return f"{self.found.sweep}/{self.target.id}/attempt-{one.number}"

    def _unchanged(self, one: StoredAttempt, own: StoredAttempt) -> bool:
        """Whether nothing was written since it was copied, by sizes and times of its files."""
        try:
            mark = Collected.read(own.attempt)
        except StoredFileError:
            return False
        if self.how.checksum or mark is None or not mark.ended or not own.ended:
            return False
        stamps = one.stamps(logs=self.how.logs)
        copied = {name: (file.bytes, file.mtime_ns) for name, file in mark.files.items()}
        return all(copied.get(name) == stamp for name, stamp in stamps.items())

    def _refuse_other(
        self, cell: dict[str, Any], theirs: Iterable[StoredAttempt], ours: dict[int, StoredAttempt]
    ) -> None:
        """Raise a StoredFileError unless both folders have the same run, as far as both have it."""
        own_cell = self.target.path / "cell.json"
        if own_cell.exists() and read_object(own_cell) != cell:
            raise StoredFileError(own_cell, f"is another cell than {self.source.path / 'cell.json'}")
        both = [(one, ours[one.number]) for one in theirs if one.number in ours]
        other = next(((one, own) for one, own in both if one.identity != own.identity), None)
        if other is not None:
            one, own = other
            raise StoredFileError(
                own.attempt.path,
                f"is the attempt {own.identity}, and {self.how.source} has {one.identity} by this name: the "
                "cell was run twice; collect one of the two into another --runs",
            )
        if ours and not both:
            raise StoredFileError(
                self.target.path,
                f"has no attempt in common with {self.how.source}: the cell was run twice; collect one of "
                "the two into another --runs",
            )

    def _merge_attempt(
        self, one: StoredAttempt, ours: dict[int, StoredAttempt], cell: dict[str, Any]
    ) -> None:
        own, name = ours.get(one.number), self._name(one)
        if own is None:
            self._add(one, ours, cell)
        elif own.ended or not is_collected(own.attempt):
            self._compare(one, own)
        else:
            if one.ended and (reason := damage(one.attempt, cell)):
                self.found.damaged.append(reason)
                return
            self.how.refresh(one, own.attempt)
            self.found.refreshed.append(name)
            if not one.ended:
                self.found.running.append(name)

    def _add(self, one: StoredAttempt, ours: dict[int, StoredAttempt], cell: dict[str, Any]) -> None:
        try:
            _check_continued(one, ours)
            if not self.target.path.is_dir():
                make_inside(self.target.path)
            target = Attempt(self.target.path / one.attempt.path.name)
            folder = self.how.copy_new(one, target)
            # The copy is checked, not the source: this also finds what went wrong on the way.
            reason = damage(folder, cell) if one.ended else None
        except StoredFileError as error:
            self.found.differing.append(str(error))
            return
        if reason:
            self.how.discard(folder)
            self.found.damaged.append(reason.replace(str(folder.path), str(one.attempt.path)))
            return
        self.how.publish(folder, target)
        ours[one.number] = StoredAttempt(target)
        self.found.new.append(self._name(one))
        if not one.ended:
            self.found.running.append(self._name(one))

    def _compare(self, one: StoredAttempt, own: StoredAttempt) -> None:
        """Two copies of an attempt that are both final, or of which this folder's is the one that runs."""
        self.found.present.append(self._name(one))
        if not own.ended and one.ended:
            self.found.differing.append(
                f"{own.attempt.path} has no outcome and was not collected, but it has ended in "
                f"{self.how.source}; if nothing runs it here, remove it and collect again"
            )
        if not (one.ended and own.ended):  # this one is newer
            return
        theirs, mine = (each.stamps(logs=self.how.logs) for each in (one, own))
        differs = [name for name in theirs if name in mine and not _same(one, own, name)]
        missing = [name for name in theirs if name not in mine and not name.startswith("logs/")]
        if differs or missing:
            words = [f"{name} differs" for name in differs] + [f"{name} is missing here" for name in missing]
            self.found.differing.append(
                f"{own.attempt.path}: {', '.join(words)}, compared with {self.how.source}; left as it is"
            )

    def _add_cell_file(self, ours: dict[int, StoredAttempt] | None) -> None:
        """Write `cell.json` last: without it readers do not see a cell that was copied in part."""
        path = self.target.path / "cell.json"
        if ours == {} or not self.target.path.is_dir() or path.exists():
            return
        write_whole(path, read_bytes(self.source.path / "cell.json"))


def _check_continued(one: StoredAttempt, ours: dict[int, StoredAttempt]) -> None:
    """Raise a StoredFileError if the attempt would continue another than the one that it was made from."""
    before = one.launch.get("continues")
    if before is None:
        return
    refused = partial(StoredFileError, one.attempt.path / "launch.json")
    if before not in ours:
        raise refused(f"continues={before!r}: there is no such attempt, so it was not collected")
    expected = one.launch.get("continues_id")
    got = ours[before].launch.get("id")
    if expected is not None and got != expected:
        raise refused(
            f"continues={before} is the attempt with the id {expected}, but attempt-{before} here has {got}: "
            "runs were copied into each other; it was not collected"
        )


def _same(one: StoredAttempt, own: StoredAttempt, name: str) -> bool:
    paths = [each.attempt.path / name for each in (one, own)]
    if name == "launch.json":  # a queue may have added the job's number since
        return one.identity == own.identity
    return (
        paths[0].stat().st_size == paths[1].stat().st_size and len({sha256_of(path) for path in paths}) == 1
    )
