"""Finding the newest checkpoint that every rank can read, and reading this rank's part of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.runs.checkpoint_store import FORMAT_VERSION, CheckpointStore, Saved, resumable
from harness.runs.store import Attempt
from harness.training.all_gather import all_gather_rows
from harness.training.checkpoint.parts import SHARED, DamagedError, Sum, own_part, read_part
from harness.training.world import World

_MOST_OFFERS = 16  # checkpoints that are looked at before a run starts anew: those of eight attempts


@dataclass(frozen=True)
class Loaded:
    """What to go on from.

    Attributes:
        shared: what was the same on every rank.
        parts: what each rank had to itself; this rank's alone if the world size is the same, else all.
        same_world: whether the world size is the one that was saved.
        saved_at: Unix time, seconds.
        attempt: number of the attempt that it is of.
    """

    step: int
    shared: Any
    parts: list[Any]
    same_world: bool
    saved_at: float
    attempt: int


def load_newest(attempt: Attempt, world: World) -> tuple[Loaded | None, list[str]]:
    """The newest checkpoint that is undamaged for all ranks; every rank calls it, and all get the same.

    Returns:
        It, or None; and a sentence for each that was passed over.
    """
    notes: list[str] = []
    for offered, saved in _offers(attempt, world):
        loaded, reason = None, ""
        try:
            loaded = _read(saved, offered.number, world)
        except DamagedError as error:
            reason = f": {error}"
        told = all_gather_rows(world.communicator, world.device, [loaded is not None])
        bad = [str(rank) for rank, (readable,) in enumerate(told) if not readable]
        if not bad:
            return loaded, notes
        where = f"of step {saved.step} in {offered.path.name}"
        notes.append(f"checkpoint {where} is damaged for ranks {', '.join(bad)} and passed over{reason}")
    return None, notes


def _offers(attempt: Attempt, world: World) -> list[tuple[Attempt, Saved]]:
    """What rank 0 sees, on every rank: a file system may show each of them another moment."""
    own: list[float] = []
    if world.rank == 0:
        own = [number for one, saved in resumable(attempt) for number in (one.number, saved.step)]
    own = [*own, *[-1.0] * (2 * _MOST_OFFERS)][: 2 * _MOST_OFFERS]
    offered = all_gather_rows(world.communicator, world.device, own)[0]
    pairs = zip(offered[::2], offered[1::2], strict=True)
    folder = attempt.path.parent
    places = [(Attempt(folder / f"attempt-{int(number)}"), int(step)) for number, step in pairs if number > 0]
    return [(one, CheckpointStore(one).saved(step)) for one, step in places]


def _read(saved: Saved, number: int, world: World) -> Loaded:
    try:
        manifest = saved.manifest()
        sums = {name: Sum(**part) for name, part in manifest["parts"].items()}
        version, world_size, saved_at = (manifest[key] for key in ("version", "world_size", "saved_at"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"manifest.json: {type(error).__name__} {error}") from error
    if version != FORMAT_VERSION:
        raise DamagedError(f"it is of version {version}, this one reads {FORMAT_VERSION}")
    same_world = world_size == world.world_size
    ranks = [world.rank] if same_world else range(world_size)
    parts = [read_part(saved.path / own_part(rank), sums[own_part(rank)]) for rank in ranks]
    shared = read_part(saved.path / SHARED, sums[SHARED]) if SHARED in sums else parts[0]["shared"]
    return Loaded(saved.step, shared, parts, same_world, saved_at, number)
