"""How the ranks of an attempt ended, as their launcher saw it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.launchers.stopping import Reason
from harness.runs.store import Attempt
from harness.runs.stored_files import parse_object, read_bytes


@dataclass(frozen=True)
class RankDeath:
    """The end of one rank.

    Attributes:
        exit_code: as of `subprocess`: minus the signal's number when killed by one.
        own: whether the rank ended by itself; false when its launcher ended it.
    """

    rank: int
    exit_code: int
    own: bool


@dataclass(frozen=True)
class RanksEnd:
    """Why the ranks ended, and all deaths in the order in which they were seen."""

    reason: Reason
    deaths: tuple[RankDeath, ...]


def end_lines(attempt: Attempt, rank: int) -> list[dict[str, Any]]:
    """Lines of the rank's end file, which `rank_wrapper` writes: one from its start, one from its end."""
    try:
        text = read_bytes(path := attempt.path / f"rank-{rank:05}.end")
    except FileNotFoundError:
        return []
    return [parse_object(line, path) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
