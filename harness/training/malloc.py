"""malloc tuning: keeps freed memory in the process, for the next step that allocates as much again."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER = -1
_LARGEST = 32 << 20  # bytes; glibc accepts no larger threshold, and always maps larger blocks
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


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
