"""Copies of many tensors with few launches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def copy_together(pairs: Sequence[Pair]) -> None:
    """Copy the second tensor of each pair to the first.

    `_foreach_copy_` is one launch for all pairs only if both tensors of each are laid out alike and dense.
    Those of other pairs, as a matrix whose rows end in the bias, or a gradient in channels-last order, pass
    through a dense tensor for all pairs of a layout, if one side of them lies evenly spaced in memory.
    """
    direct: dict[torch.dtype, list[Pair]] = {}
    layouts: dict[tuple[object, ...], list[Pair]] = {}
    for target, source in ((target.squeeze(), source.squeeze()) for target, source in pairs):
        alike = target.stride() == source.stride() and target.dtype == source.dtype
        if alike and torch.ops.aten.is_non_overlapping_and_dense(target):
            direct.setdefault(target.dtype, []).append((target, source))
        else:
            layout = target.shape, target.stride(), target.dtype, source.stride(), source.dtype
            layouts.setdefault(layout, []).append((target, source))
    last: list[Pair] = []
    for found in layouts.values():
        targets, sources = [target for target, _ in found], [source for _, source in found]
        if len(found) > 1 and (whole := evenly_spaced(sources)) is not None:
            passed = _dense(targets)
            passed.copy_(whole)
            direct.setdefault(passed.dtype, []).extend(zip(targets, passed.unbind(), strict=True))
        elif len(found) > 1 and (whole := evenly_spaced(targets)) is not None:
            passed = _dense(sources)
            direct.setdefault(passed.dtype, []).extend(zip(passed.unbind(), sources, strict=True))
            last.append((whole, passed))
        else:
            last += found
    for alike_pairs in direct.values():
        torch._foreach_copy_([target for target, _ in alike_pairs], [source for _, source in alike_pairs])
    for target, source in last:
        target.copy_(source)


def evenly_spaced(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors of one shape and layout as one view with a leading dimension, if one memory holds them."""
    first, *others = tensors
    memory, start = first.untyped_storage()._cdata, first.storage_offset()
    step = others[0].storage_offset() - start if others else first.numel()
    for place, tensor in enumerate(tensors):
        if tensor.untyped_storage()._cdata != memory or tensor.storage_offset() != start + place * step:
            return None
    if step <= 0:
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()), start)


def _dense(like: Sequence[Tensor]) -> Tensor:
    """Memory for tensors that are laid out like the first of these, one after another."""
    first = like[0]
    strides = torch.empty_like(first, device="meta").stride()  # dense, in the order of its dimensions
    return first.new_empty_strided((len(like), *first.shape), (first.numel(), *strides))


def adjacent_runs(tensors: Sequence[Tensor]) -> list[slice]:
    """The longest runs of contiguous tensors of one size that follow each other in memory."""
    runs: list[slice] = []
    for place, tensor in enumerate(tensors):
        before = tensors[place - 1]
        follows = (
            place > 0
            and tensor.numel() == before.numel()
            and tensor.untyped_storage()._cdata == before.untyped_storage()._cdata
            and tensor.storage_offset() == before.storage_offset() + before.numel()
        )
        if follows:
            runs[-1] = slice(runs[-1].start, place + 1)
        else:
            runs.append(slice(place, place + 1))
    return runs
