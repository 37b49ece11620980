"""Finds the newest checkpoint that every rank can read, and reads this rank's part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.errors import StoredFileError
from harness.runs.checkpoint_store import FORMAT_VERSION, CheckpointStore, Saved, resumable
from harness.runs.store import Attempt
from harness.training.checkpoint.parts import SHARED, DamagedError, own_part, read_part
from harness.training.world import World, all_gather_rows

_MOST_CANDIDATES = 16  # checkpoints tried before a run starts anew: those of eight attempts


@dataclass(frozen=True)
class Loaded:
    """The content of a checkpoint.

    Attributes:
        shared: what was the same on every rank.
        parts: what each rank had of its own; only this rank's if the world size is the same, else all.
        same_world: whether the world size is the one that was saved.
        saved_at: Unix time, seconds.
        attempt: number of the attempt that saved it.
    """

    step: int
    shared: Any
    parts: list[Any]
    same_world: bool
    saved_at: float
    attempt: int


def load_newest(attempt: Attempt, world: World) -> tuple[Loaded | None, list[str]]:
    """The newest checkpoint that is undamaged for all ranks; a collective call with the same result on all.

    Returns:
        The checkpoint, or None; and a sentence for each that was passed over.
    """
    notes: list[str] = []
    for owner, saved in _candidates(attempt, world):
        loaded, reason = None, ""
        try:
            loaded = _read(saved, owner.number, world)
        except DamagedError as error:
            reason = f": {error}"
        readable = all_gather_rows(world.communicator, world.device, [loaded is not None])
        bad = [str(rank) for rank, (on_rank,) in enumerate(readable) if not on_rank]
        if not bad:
            return loaded, notes
        where = f"of step {saved.step} in {owner.path.name}"
        notes.append(f"checkpoint {where} is damaged for ranks {', '.join(bad)} and passed over{reason}")
    return None, notes


def _candidates(attempt: Attempt, world: World) -> list[tuple[Attempt, Saved]]:
    """The checkpoints that rank 0 finds; a file system may show each rank a different list."""
    own: list[float] = []
    if world.rank == 0:
        own = [number for one, saved in resumable(attempt) for number in (one.number, saved.step)]
    own = [*own, *[-1.0] * (2 * _MOST_CANDIDATES)][: 2 * _MOST_CANDIDATES]
    row = all_gather_rows(world.communicator, world.device, own)[0]
    pairs = zip(row[::2], row[1::2], strict=True)
    folder = attempt.path.parent
    found = [(Attempt(folder / f"attempt-{int(number)}"), int(step)) for number, step in pairs if number > 0]
    return [(owner, CheckpointStore(owner).saved(step)) for owner, step in found]


def _read(saved: Saved, number: int, world: World) -> Loaded:
    try:
        manifest = saved.manifest()
    except (OSError, StoredFileError) as error:
        raise DamagedError(f"manifest.json: {type(error).__name__} {error}") from error
    if manifest.version != FORMAT_VERSION:
        raise DamagedError(f"its format has version {manifest.version}, must be {FORMAT_VERSION}")
    if manifest.step != saved.step:
        raise DamagedError(f"its manifest is of step {manifest.step}, its folder of step {saved.step}")
    sums, missing = manifest.parts, set(map(own_part, range(manifest.world_size))) - manifest.parts.keys()
    if missing:
        raise DamagedError(f"its manifest lists no {', '.join(sorted(missing))}")
    same_world = manifest.world_size == world.world_size
    ranks = [world.rank] if same_world else range(manifest.world_size)
    parts = [read_part(saved.path / own_part(rank), sums[own_part(rank)]) for rank in ranks]
    shared = read_part(saved.path / SHARED, sums[SHARED]) if SHARED in sums else parts[0]["shared"]
    return Loaded(saved.step, shared, parts, same_world, manifest.saved_at, number)
