"""Saving what all ranks agreed to save: parts first, by all ranks at once, the manifest last, by rank 0."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from harness.runs.checkpoint_store import FORMAT_VERSION, CheckpointStore
from harness.training.all_gather import all_gather_rows
from harness.training.checkpoint.parts import SHARED, Sum, own_part, sum_of, write_part
from harness.training.world import World


def save_parts(
    shelf: CheckpointStore,
    world: World,
    step: int,
    about: Mapping[str, Any],
    shared: Any,
    own: Mapping[str, Any],
) -> tuple[str, int]:
    """Save before `step`; every rank calls it, and all of them know what came of it.

    Args:
        shelf: of the attempt.
        world: its ranks.
        step: that a resumed run begins with.
        about: what else the manifest is to say.
        shared: saved once if it is the same on every rank.
        own: what only this rank has.

    Returns:
        Why it could not be saved, or an empty text; bytes written by all ranks.
    """

    def tell(*numbers: float) -> list[list[float]]:
        return all_gather_rows(world.communicator, world.device, numbers)

    # Parameters are the same on every rank, if the collectives gave all ranks the same bits. That is
    # checked, and where it does not hold every rank saves its own.
    rows = tell(_errno(lambda: shelf.begin(step)) if world.rank == 0 else 0, sum_of(shared).crc32)
    same = len({crc32 for _, crc32 in rows}) == 1
    if not _refused(rows):
        errno, sums = _write(shelf, world.rank, step, shared, own, same)
        rows = tell(errno, *(number for one in sums for number in (one.size_bytes, one.crc32)))
    written_bytes = int(sum(sum(row[1::2]) for row in rows))
    if not _refused(rows):
        parts = _parts(rows, same)
        manifest = {
            "version": FORMAT_VERSION, "step": step, "world_size": world.world_size, **about,
            "saved_at": time.time(), "parts": {name: asdict(one) for name, one in parts.items()},
        }  # fmt: skip
        rows = tell(_errno(lambda: shelf.publish(step, manifest)) if world.rank == 0 else 0)
    error = _refused(rows)
    if error and world.rank == 0:
        shelf.abandon(step)
    return error, 0 if error else written_bytes


def _write(
    shelf: CheckpointStore, rank: int, step: int, shared: Any, own: Mapping[str, Any], same: bool
) -> tuple[int, list[Sum]]:
    """An error number; sums of the shared part, which only rank 0 writes, and of this rank's own."""
    sums = [Sum(0, 0), Sum(0, 0)]
    content = own if same else {**own, "shared": shared}
    try:
        sums[1] = write_part(shelf.part(step, own_part(rank)), content)
        if same and rank == 0:
            sums[0] = write_part(shelf.part(step, SHARED), shared)
    except OSError as error:
        return error.errno or -1, sums
    return 0, sums


def _parts(rows: list[list[float]], same: bool) -> dict[str, Sum]:
    parts = {own_part(rank): Sum(int(row[3]), int(row[4])) for rank, row in enumerate(rows)}
    if same:
        parts[SHARED] = Sum(int(rows[0][1]), int(rows[0][2]))
    return parts


def _refused(rows: list[list[float]]) -> str:
    """What the system said to those whose error number, first in their row, is not zero."""
    failed = [(rank, int(row[0])) for rank, row in enumerate(rows) if row[0]]
    return "; ".join(f"rank {rank}: {os.strerror(errno)}" for rank, errno in failed)


def _errno(action: Callable[[], object]) -> int:
    """Zero, or what the system said when it refused."""
    try:
        action()
    except OSError as error:
        return error.errno or -1
    return 0
