"""Batch normalisation over the batches of all ranks, on CPUs and GPUs, over Gloo, NCCL and MPI.

torch's SyncBatchNorm runs on GPUs only, and its collectives would not be counted. Mean and variance are put
together from those of the ranks' batches by the update of Chan, Golub & LeVeque 1979 ("Updating formulae and
a pairwise algorithm for computing sample variances"), which does not cancel as sums of squares do.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from harness.training.gradient_averaging import Waiting
from kfac_core.collectives import Communicator


def synchronise_batch_norm(model: nn.Module, communicator: Communicator, waiting: Waiting) -> None:
    """Replace every batch normalisation of a model, in place, by one over all ranks.

    Parameters and running statistics stay the same tensors under the same names. All ranks call it at the
    same time, and then run the same layers in the same order; their batches may differ in size.

    Args:
        model: on its device.
        communicator: of the ranks. The layers have a duplicate, because buckets of gradients travel during
            the same backward pass.
        waiting: a context for the collectives.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()  # named_children leaves repeated ones out
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
    ]
    if not found or communicator.world_size == 1:
        return
    own = communicator.duplicate()
    own.prepare((), torch.empty(0, device=next(model.parameters()).device))
    made: dict[nn.Module, SynchronisedBatchNorm] = {}  # a layer may be in several places
    for parent, name, child in found:
        if child not in made:
            made[child] = SynchronisedBatchNorm(child, own, waiting)
        setattr(parent, name, made[child])


class SynchronisedBatchNorm(nn.modules.batchnorm._BatchNorm):
    """Normalises by the mean and variance of each channel over the batches of all ranks.

    An input is `[B, C, ...]`, of any B, also 0. While evaluating it is `norm` itself.

    Args:
        norm: the layer that it replaces.
        communicator: of the ranks.
        waiting: a context for the collectives.
    """

    def __init__(
        self, norm: nn.modules.batchnorm._BatchNorm, communicator: Communicator, waiting: Waiting
    ) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.num_batches_tracked = norm.num_batches_tracked
        self.train(norm.training)
        self._communicator, self._waiting = communicator, waiting

    def forward(self, input: Tensor) -> Tensor:
        """The normalised input; updates the running statistics, alike on all ranks.

        Raises:
            ValueError: all ranks together have one value per channel, which has no variance.
        """
        if not self.training and self.running_mean is not None:
            return super().forward(input)
        normalised: Tensor = _Normalise.apply(input, self.weight, self.bias, self)  # type: ignore[no-untyped-call]  # torch's own
        return normalised

    def _check_input_dim(self, input: Tensor) -> None:
        """Any number of dimensions: the layer stands for all of torch's."""

    def statistics(self, own: Moments) -> Moments:
        """The moments of all ranks' values, from those of this rank."""
        ranks, size = self._communicator.world_size, len(own.packed())
        table = own.packed().new_zeros(ranks, size)
        table[self._communicator.rank] = own.packed()
        with self._waiting():
            self._communicator.gather_parts(table.view(-1), [size] * ranks, tuple(range(ranks)))
        return combined(table)

    def sum_over_ranks(self, buffer: Tensor) -> None:
        """Add up a buffer over all ranks, in place."""
        with self._waiting():
            self._communicator.all_reduce(buffer)

    def track(self, moments: Moments) -> None:
        """Update the running statistics, the variance without bias, as torch's layers do."""
        if self.running_mean is None or self.running_var is None or not self.training:
            return
        assert self.num_batches_tracked is not None  # noqa: S101  as there are running statistics
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(moments.mean.to(self.running_mean.dtype), share)
        unbiased = moments.squares / (moments.number - 1)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)


class Moments(NamedTuple):
    """Moments of the values of each channel.

    Attributes:
        number: of values per channel, a scalar tensor.
        mean: `[C]`.
        squares: `[C]`, the sum of the squared distances to the mean.
    """

    number: Tensor
    mean: Tensor
    squares: Tensor

    def packed(self) -> Tensor:
        """All of it in one tensor `[2 C + 1]`."""
        return torch.cat((self.mean, self.squares, self.number.view(1)))


def moments_of(values: Tensor) -> Moments:
    """Those of values `[B, C, ...]`; zeros of an empty batch."""
    count = values.new_tensor(values.numel() // values.shape[1])
    if not values.numel():
        nothing = values.new_zeros(values.shape[1])
        return Moments(count, nothing, nothing)
    variance, mean = torch.var_mean(values, dim=_all_but_channels(values), correction=0)
    return Moments(count, mean, variance * count)


def combined(table: Tensor) -> Moments:
    """Moments of all values, from a row of packed moments of each rank's; the same bits on every rank."""
    channels = table.shape[1] // 2
    means, squares, counts = table.split((channels, channels, 1), dim=1)
    count = counts.sum()
    mean = (counts * means).sum(0) / count
    return Moments(count, mean, squares.sum(0) + (counts * (means - mean).square()).sum(0))


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias; the gradient goes through mean and variance too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: SynchronisedBatchNorm
    ) -> Tensor:
        moments = layer.statistics(moments_of(_wide(x)))
        if x.numel() <= x.shape[1] and moments.number <= 1:  # else a GPU need not be awaited
            raise ValueError(f"batch normalisation over all ranks has one value per channel, got {x.shape}")
        layer.track(moments)
        variance = moments.squares / moments.number
        ctx.layer, ctx.count = layer, moments.number
        ctx.save_for_backward(x, weight, moments.mean, torch.rsqrt(variance + layer.eps))
        mean, variance = (
            each if weight is None else each.to(weight.dtype) for each in (moments.mean, variance)
        )
        return functional.batch_norm(x, mean, variance, weight, bias, training=False, eps=layer.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        shape = (1, -1, *(1 for _ in x.shape[2:]))
        dims = _all_but_channels(x)
        g, centred = _wide(gradient), _wide(x) - mean.view(shape)
        sums = torch.stack((g.sum(dims), (g * centred).sum(dims)))
        to_bias, to_weight = sums[0].clone(), sums[1] * scale
        to_input = None
        if ctx.needs_input_grad[0]:  # the same on all ranks
            ctx.layer.sum_over_ranks(sums)
            along_mean, along_scale = (sums[0] / ctx.count, sums[1] * scale.square() / ctx.count)
            factor = scale if weight is None else scale * weight
            projected = g - along_mean.view(shape) - centred * along_scale.view(shape)
            to_input = (projected * factor.view(shape)).to(x.dtype)
        if weight is None:
            return to_input, None, None, None
        return to_input, to_weight.to(weight.dtype), to_bias.to(weight.dtype), None


def _all_but_channels(values: Tensor) -> list[int]:
    return [dim for dim in range(values.ndim) if dim != 1]


def _wide(values: Tensor) -> Tensor:
    """In float32 at least, as torch computes statistics."""
    return values if values.dtype in (torch.float32, torch.float64) else values.float()
