"""What all programs that a launcher starts as ranks share: command line, malloc, failure record, exit."""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

from harness.runs.records import FailureRecord
from harness.runs.store import Attempt

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER = -1
_LARGEST = 32 << 20  # bytes; glibc accepts no larger threshold, and always maps larger blocks
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


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


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Set glibc's malloc not to return freed memory to the system; returns whether that worked.

    By default a backward pass that frees its activations shrinks the heap, if they happen to be at its end,
    and the next forward pass takes a page fault for every 4 KiB. Equal runs then differ by chance. Settings
    of malloc in the user's environment, other allocators and other C libraries are not changed.
    """
    if any(name in environment for name in _USER_SETTINGS) or "malloc" in environment.get("LD_PRELOAD", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_MMAP_THRESHOLD, _LARGEST))


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
