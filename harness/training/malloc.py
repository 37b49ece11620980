"""Keeps freed memory with the process, for the next step that asks for as much again."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_NEVER = -1
_LARGEST = 32 << 20  # bytes; glibc takes no larger threshold, and maps what is larger anew each time
_CHOICES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Ask glibc's malloc not to hand freed memory back to the system; returns whether it will.

    By default a backward pass that frees its activations shrinks the heap, if they happen to lie at its end,
    and the next forward pass takes a page fault each 4 KiB: 50,000 in a step of ResNet-32 at batch 128 on a
    CPU, 528 ms in place of 462. Equal runs differ by that accident. What the user has said about malloc in
    the environment stands, and other allocators and C libraries are left alone.
    """
    if any(name in environment for name in _CHOICES) or "malloc" in environment.get("LD_PRELOAD", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER) and mallopt(_MMAP_THRESHOLD, _LARGEST))
