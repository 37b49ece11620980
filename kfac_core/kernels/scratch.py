"""Room for what lives only inside one function, without asking the system for it every time."""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor
from torch.nn import Parameter

_PLAIN = (Tensor, Parameter)


class _Kept(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[torch.dtype, Tensor] = {}


_kept = _Kept()


def scratch(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised memory of `shape` in the dtype and on the device of `like`, until the next call.

    On a CPU one buffer a thread and dtype is kept and grows to the largest request: fresh memory of megabytes
    costs a page fault each 4 KiB, measured at twice the time of the copy that fills it. On a GPU torch's own
    allocator keeps freed memory.
    """
    if not like.is_cpu or not is_plain(like):
        return like.new_empty(shape)
    elements = math.prod(shape)
    held = _kept.buffers.get(like.dtype)
    if held is None or held.numel() < elements:
        with torch.inference_mode(False):  # else no later training step could write into it
            held = _kept.buffers[like.dtype] = like.new_empty(elements)
    return held[:elements].view(shape)


def is_plain(like: Tensor) -> bool:
    """Whether what is made beside `like` may be kept: not beside a subclass, as in an emulated world."""
    return type(like) in _PLAIN
