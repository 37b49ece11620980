"""Checks whether a folder can hold runs, with the functions that write them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from harness.doctor.findings import Finding, fault, in_bytes, ok, skipped, warning
from harness.errors import StoreError
from harness.runs.locks import take
from harness.runs.stored_files import write_atomically, write_once

_LITTLE_BYTES = 1 << 30  # records of a hundred cells, or one checkpoint of a large model
_FULL_BYTES = 10 << 20
_OTHER_FOLDER = "set --runs to a folder on another file system that all nodes share"


def check_storage(folder: Path) -> list[Finding]:
    """Try every file operation of a run in a new folder, two levels below all runs; only the folder stays."""
    runs = folder.parent.parent
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        found = f"{runs} cannot be written: {error.strerror}"
        advice = "set --runs to a folder that you can write to, on a file system that all nodes share"
        return [
            fault("runs: write", found, advice),
            *(skipped(f"runs: {name}", "nothing can be written to it") for name in _CHECKS),
        ]
    return [ok("runs: write", str(runs)), *(_run_check(name, folder) for name in _CHECKS)]


def check_space(free_bytes: int) -> Finding:
    """Whether there is space for runs; a quota may allow less than the file system reports."""
    found = f"{in_bytes(free_bytes)} free on its file system"
    if free_bytes < _FULL_BYTES:
        return fault("runs: space", found, "free some space, or set --runs to another file system")
    if free_bytes < _LITTLE_BYTES:
        return warning("runs: space", found, "free some space before runs that save checkpoints")
    return ok("runs: space", found)


def _run_check(name: str, folder: Path) -> Finding:
    try:
        return _CHECKS[name](folder)
    except StoreError as error:
        return fault(f"runs: {name}", str(error), _OTHER_FOLDER)
    except OSError as error:
        return fault(f"runs: {name}", f"{error.strerror} ({error.filename or folder})", _OTHER_FOLDER)


def _check_link(folder: Path) -> Finding:
    """An outcome is written by hard link, so that of two writers the first wins."""
    path = folder / "once"
    writes = [write_once(path, text) for text in ("first", "second")]
    path.unlink()
    again = write_once(path, "first")
    kept = path.read_text()
    path.unlink()
    if (writes, again, kept) != ([True, False], True, "first"):
        return fault("runs: link", f"of two writers {writes} wrote, and {kept!r} was kept", _OTHER_FOLDER)
    return ok("runs: link", "of two writers the first wins")


def _check_rename(folder: Path) -> Finding:
    path = folder / "renamed"
    for text in ("old", "new"):
        write_atomically(path, text)
    kept = path.read_text()
    path.unlink()
    if kept != "new":
        return fault("runs: rename", f"a file that was replaced still reads {kept!r}", _OTHER_FOLDER)
    return ok("runs: rename", "a file is replaced whole")


def _check_lock(folder: Path) -> Finding:
    path = folder / "lock"
    first = take(path)
    second = take(path)
    for held in (first, second):
        if held is not None:
            held.close()
    path.unlink()
    if first is None or second is not None:
        found = "two processes can hold one lock; cells still run once, by hard link"
        return warning("runs: lock", found, "do not run kronscale submit of one sweep in two shells at once")
    return ok("runs: lock", "one holder at a time")


_CHECKS: dict[str, Callable[[Path], Finding]] = {
    "link": _check_link,
    "rename": _check_rename,
    "lock": _check_lock,
    "space": lambda folder: check_space(shutil.disk_usage(folder).free),
}
