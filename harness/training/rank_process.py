"""What all programs that a launcher starts as ranks share: command line, failure record, exit."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

from harness.runs.records import FailureRecord
from harness.runs.store import Attempt


@dataclass(frozen=True)
class RankArguments:
    """The arguments of a rank's command line.

    Attributes:
        threads: number of threads that torch may use.
    """

    attempt: Attempt
    rank: int
    world_size: int
    local_rank: int
    threads: int

    @classmethod
    def read(cls, about: str | None) -> Self:
        """Parse this process's command line."""
        parser = argparse.ArgumentParser(description=about)
        parser.add_argument("attempt", type=Path)
        for option in ("rank", "world-size", "local-rank", "threads"):
            parser.add_argument(f"--{option}", type=int, required=True)
        given = parser.parse_args()
        return cls(Attempt(given.attempt), given.rank, given.world_size, given.local_rank, given.threads)


def failure_record(rank: int, step: int, phase: str, error: Exception) -> FailureRecord:
    """The last record of a rank that fails with `error`; call it while `error` is being handled."""
    return FailureRecord(
        rank=rank,
        step=step,
        phase=phase,
        error=type(error).__name__,
        message=str(error),
        traceback=traceback.format_exc(),
    )


def exit_at_once(code: int) -> NoReturn:
    """Exit without waiting for other ranks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a failed rank's process group must not be torn down in order: its peers may be gone
