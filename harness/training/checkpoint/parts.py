"""Checkpoints on disk: saved by all ranks or not at all, and loaded only if undamaged for every rank.

First all ranks write their parts at once, each with a checksum, then rank 0 writes the manifest.
"""

from __future__ import annotations

import os
import pickle
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch

from harness.errors import StoredFileError
from harness.runs.checkpoint_store import FORMAT_VERSION, CheckpointStore, Manifest, PartSum, Saved, resumable
from harness.runs.store import Attempt
from harness.training.world import World

SHARED, OWN = "shared.pt", "rank-{:05}.pt"  # files of what all ranks have alike, and of what one has


class DamagedError(Exception):
    """A part cannot be read, or does not match its manifest."""


class Loaded(NamedTuple):
    """A checkpoint: what was the same on every rank and what only this rank had, and who saved it when."""

    step: int
    shared: Any
    own: Any
    saved_at: float
    attempt: int


def save(
    store: CheckpointStore,
    world: World,
    step: int,
    about: Mapping[str, Any],
    shared: Any,
    own: dict[str, Any],
) -> tuple[str, int]:
    """Save before `step`, a run's first one if it resumes from here; a collective call with one result.

    `shared` is saved once if it is the same on every rank; `about` are further fields of the manifest.

    Returns:
        Why it could not be saved, or an empty text; bytes written by all ranks.
    """
    # Parameters are the same on every rank if collectives return the same bits to all. The checksums verify
    # that; where they differ every rank saves its own.
    same = len(set(world.all_gather(_summed(shared, None).crc32))) == 1
    contents = {OWN.format(world.rank): own if same else {**own, "shared": shared}}
    if same and world.rank == 0:
        contents[SHARED] = shared
    sums: dict[str, PartSum] = {}

    def write() -> None:
        for name, content in contents.items():
            sums[name] = write_part(store.part(step, name), content)

    error = _errors(world, lambda: store.begin(step), everywhere=False) or _errors(world, write)
    rows = world.all_gather({name: astuple(part) for name, part in sums.items()})
    parts = {name: PartSum(*pair) for of_rank in rows for name, pair in of_rank.items()}
    manifest = Manifest(FORMAT_VERSION, step, world.world_size, **about, saved_at=time.time(), parts=parts)
    error = error or _errors(world, lambda: store.publish(step, manifest), everywhere=False)
    if error and world.rank == 0:
        store.abandon(step)
    return error, 0 if error else sum(part.size_bytes for part in parts.values())


def load_newest(attempt: Attempt, world: World) -> tuple[Loaded | None, list[str]]:
    """The newest checkpoint that is undamaged for all ranks; a collective call with the same result on all.

    Returns:
        The checkpoint, or None; and a sentence for each that was passed over.
    """
    notes: list[str] = []
    # Those that rank 0 sees: a file system may show each rank a different list.
    listed = [(one.number, saved.step) for one, saved in resumable(attempt)] if world.rank == 0 else []
    for number, step in world.all_gather(listed)[0]:
        owner = Attempt(attempt.path.with_name(f"attempt-{number}"))
        loaded, damage = None, ""
        try:
            loaded = _read(CheckpointStore(owner).saved(step), number, world)
        except DamagedError as error:
            damage = str(error)
        damages = {str(rank): on_rank for rank, on_rank in enumerate(world.all_gather(damage)) if on_rank}
        if not damages:
            return loaded, notes
        notes.append(
            f"checkpoint of step {step} in {owner.path.name} is damaged for ranks {', '.join(damages)} and "
            f"passed over: {next(iter(damages.values()))}"
        )
    return None, notes


def write_part(path: Path, content: Any) -> PartSum:
    """Write tensors, numbers, strings and containers of them, and sync them to disk.

    Raises:
        OSError: the disk is full or missing.
    """
    with path.open("wb") as file:
        written = _summed(content, file)
        file.flush()
        os.fsync(file.fileno())
    return written


def read_part(path: Path, expected: PartSum) -> Any:
    """Read what `write_part` wrote, onto the CPU, without running code that the file contains.

    Raises:
        DamagedError: the file is missing, was changed, or contains more than plain data.
    """
    try:
        with path.open("rb") as file:
            size_bytes = crc32 = 0
            while chunk := file.read(1 << 20):
                size_bytes += len(chunk)
                crc32 = zlib.crc32(chunk, crc32)
            if (got := PartSum(size_bytes, crc32)) != expected:
                raise DamagedError(
                    f"{path.name} must have {expected.size_bytes} bytes with checksum "
                    f"{expected.crc32:08x}, got {got.size_bytes} with {got.crc32:08x}"
                )
            file.seek(0)
            return torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise DamagedError(f"{path.name}: {error}") from error


def _read(saved: Saved, number: int, world: World) -> Loaded:
    try:
        manifest = saved.manifest()
    except (OSError, StoredFileError) as error:
        raise DamagedError(f"manifest.json: {type(error).__name__} {error}") from error
    if (manifest.version, manifest.step, manifest.world_size) != (
        FORMAT_VERSION,
        saved.step,
        world.world_size,
    ):
        raise DamagedError(
            f"its manifest is of version {manifest.version}, step {manifest.step} and {manifest.world_size} "
            f"ranks, must be of version {FORMAT_VERSION} and {world.world_size} ranks"
        )
    sums, name = manifest.parts, OWN.format(world.rank)
    if name not in sums:
        raise DamagedError(f"its manifest lists no {name}")
    own = read_part(saved.path / name, sums[name])
    shared = read_part(saved.path / SHARED, sums[SHARED]) if SHARED in sums else own["shared"]
    return Loaded(saved.step, shared, own, manifest.saved_at, number)


def _errors(world: World, action: Callable[[], object], *, everywhere: bool = True) -> str:
    """Run an action on all ranks, or on rank 0; the system's messages by rank, empty where all succeed."""
    message = ""
    try:
        if everywhere or world.rank == 0:
            action()
    except OSError as error:
        message = error.strerror or str(error) or type(error).__name__
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(world.all_gather(message)) if text]
    return "; ".join(failed)


def _summed(content: Any, file: IO[bytes] | None) -> PartSum:
    """Save to an open file, if one is given; size and checksum of what that takes."""
    writer = _SummingWriter(file)
    torch.save(content, cast("IO[bytes]", writer))
    if writer.error is not None:
        raise writer.error
    return PartSum(writer.size_bytes, writer.crc32)


class _SummingWriter:
    """A file that computes size and checksum of what is written to it.

    It stores an error instead of raising it: after an exception torch's zip writer continues to write in its
    destructor, and aborts the process.
    """

    def __init__(self, file: IO[bytes] | None) -> None:
        self._file = file
        self.size_bytes = self.crc32 = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.crc32 = zlib.crc32(view, self.crc32)
        self.size_bytes += len(view)
        if self._file is not None and self.error is None:
            try:
                self._file.write(view)
            except OSError as error:
                self.error = error
        return len(view)

    def flush(self) -> None:
        """Nothing is buffered here."""
