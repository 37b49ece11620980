"""Scratch memory for use within one function, reused between calls."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor
from torch.nn import Parameter

_PLAIN = (Tensor, Parameter)


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_dtype: dict[torch.dtype, Tensor] = {}


_buffers = _Buffers()


def scratch(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised memory of `shape` in the dtype and on the device of `like`, until the next call.

    On a CPU one buffer per thread and dtype is kept and grows to the largest request: newly allocated
    megabytes cost a page fault every 4 KiB, more than the copy that fills them. On a GPU torch's caching
    allocator keeps freed memory.
    """
    if not like.is_cpu or not is_plain(like):
        return like.new_empty(shape)
    elements = math.prod(shape)
    held = _buffers.by_dtype.get(like.dtype)
    if held is None or held.numel() < elements:
        with torch.inference_mode(False):  # else later training steps could not write to it
            held = _buffers.by_dtype[like.dtype] = like.new_empty(elements)
    return held[:elements].view(shape)


def is_plain(like: Tensor) -> bool:
    """Whether tensors made like this one may be cached: not for a subclass, as in an emulated world."""
    return type(like) in _PLAIN
