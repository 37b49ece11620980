"""Saves a checkpoint: first all ranks write their parts at once, then rank 0 writes the manifest."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from harness.runs.checkpoint_store import FORMAT_VERSION, CheckpointStore, Manifest, PartSum
from harness.training.checkpoint.parts import SHARED, own_part, sum_of, write_part
from harness.training.world import World, all_gather_rows


def save_parts(
    store: CheckpointStore,
    world: World,
    step: int,
    about: Mapping[str, Any],
    shared: Any,
    own: Mapping[str, Any],
) -> tuple[str, int]:
    """Save before `step`; a collective call with the same result on all ranks.

    Args:
        store: of the attempt.
        world: its ranks.
        step: the first step of a run that resumes from this checkpoint.
        about: further fields of the manifest.
        shared: saved once if it is the same on every rank.
        own: what only this rank has.

    Returns:
        Why it could not be saved, or an empty text; bytes written by all ranks.
    """

    def gather(*numbers: float) -> list[list[float]]:
        return all_gather_rows(world.communicator, world.device, numbers)

    # Parameters are the same on every rank if collectives return the same bits to all. The checksums verify
    # that; where they differ every rank saves its own.
    rows = gather(_errno(lambda: store.begin(step)) if world.rank == 0 else 0, sum_of(shared).crc32)
    same = len({crc32 for _, crc32 in rows}) == 1
    if not _failures(rows):
        errno, sums = _write(store, world.rank, step, shared, own, same)
        rows = gather(errno, *(number for one in sums for number in (one.size_bytes, one.crc32)))
    written_bytes = int(sum(sum(row[1::2]) for row in rows))
    if not _failures(rows):
        parts = _parts(rows, same)
        manifest = Manifest(
            FORMAT_VERSION, step, world.world_size, **about, saved_at=time.time(), parts=parts
        )
        rows = gather(_errno(lambda: store.publish(step, manifest)) if world.rank == 0 else 0)
    error = _failures(rows)
    if error and world.rank == 0:
        store.abandon(step)
    return error, 0 if error else written_bytes


def _write(
    store: CheckpointStore, rank: int, step: int, shared: Any, own: Mapping[str, Any], same: bool
) -> tuple[int, list[PartSum]]:
    """An error number; sums of the shared part, which only rank 0 writes, and of this rank's own."""
    sums = [PartSum(0, 0), PartSum(0, 0)]
    content = own if same else {**own, "shared": shared}
    try:
        sums[1] = write_part(store.part(step, own_part(rank)), content)
        if same and rank == 0:
            sums[0] = write_part(store.part(step, SHARED), shared)
    except OSError as error:
        return error.errno or -1, sums
    return 0, sums


def _parts(rows: list[list[float]], same: bool) -> dict[str, PartSum]:
    parts = {own_part(rank): PartSum(int(row[3]), int(row[4])) for rank, row in enumerate(rows)}
    if same:
        parts[SHARED] = PartSum(int(rows[0][1]), int(rows[0][2]))
    return parts


def _failures(rows: list[list[float]]) -> str:
    """The system's message for every rank whose error number, first in its row, is not zero."""
    failed = [(rank, int(row[0])) for rank, row in enumerate(rows) if row[0]]
    return "; ".join(f"rank {rank}: {os.strerror(errno)}" for rank, errno in failed)


def _errno(action: Callable[[], object]) -> int:
    """The error number of an action; zero where it succeeds."""
    try:
        action()
    except OSError as error:
        return error.errno or -1
    return 0
