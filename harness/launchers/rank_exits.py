"""How the ranks of an attempt ended, as their launcher saw it."""

from __future__ import annotations

from dataclasses import dataclass

from harness.launchers.stopping import Reason


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
