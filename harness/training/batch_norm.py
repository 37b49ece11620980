"""Batch normalisation over the batches of all ranks, on CPUs and GPUs, over Gloo, NCCL and MPI.

torch's SyncBatchNorm has no kernels for CPUs (torch 2.13), works over torch.distributed only, and its
collectives would not be counted; here one layer serves all three. Mean and variance are put together from
those of the ranks' batches by the update of Chan, Golub & LeVeque 1979 ("Updating formulae and a pairwise
algorithm for computing sample variances"), which does not cancel as sums of squares do.
"""

from __future__ import annotations

from typing import Any

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
    kinds = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
    norms = [module for module in model.modules() if isinstance(module, kinds)]
    if not norms or communicator.world_size == 1:
        return
    duplicate = communicator.duplicate()
    duplicate.prepare((), torch.empty(0, device=next(model.parameters()).device))
    replaced = {norm: SynchronisedBatchNorm(norm, duplicate, waiting) for norm in norms}
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # a layer may be in several places
            if child in replaced:
                setattr(parent, name, replaced[child])


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

    def statistics(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean `[C]`, sum `[C]` of squared distances to it and number, per channel, of all ranks' values.

        Args:
            values: of this rank, `[B, C, ...]`.
        """
        ranks, channels = self._communicator.world_size, values.shape[1]
        table = values.new_zeros(ranks, 2 * channels + 1)
        if values.numel():
            count = values.new_tensor([values.numel() // channels])
            variance, mean = torch.var_mean(values, dim=_all_but_channels(values), correction=0)
            table[self._communicator.rank] = torch.cat((mean, variance * count, count))
        with self._waiting():
            sizes = [2 * channels + 1] * ranks
            self._communicator.gather_parts(table.view(-1), sizes, tuple(range(ranks)))
        means, squares, counts = table.split((channels, channels, 1), dim=1)
        number = counts.sum()
        mean = (counts * means).sum(0) / number
        return mean, squares.sum(0) + (counts * (means - mean).square()).sum(0), number

    def sum_over_ranks(self, buffer: Tensor) -> None:
        """Add up a buffer over all ranks, in place."""
        with self._waiting():
            self._communicator.all_reduce(buffer)

    def track(self, mean: Tensor, squares: Tensor, number: Tensor) -> None:
        """Update the running statistics, the variance without bias, as torch's layers do."""
        if self.running_mean is None or self.running_var is None or not self.training:
            return
        assert self.num_batches_tracked is not None  # noqa: S101  as there are running statistics
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((squares / (number - 1)).to(self.running_var.dtype), share)


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias; the gradient goes through mean and variance too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, layer: SynchronisedBatchNorm
    ) -> Tensor:
        mean, squares, number = layer.statistics(_wide(x))
        if x.numel() <= x.shape[1] and number <= 1:  # else a GPU need not be awaited
            raise ValueError(f"batch normalisation over all ranks has one value per channel, got {x.shape}")
        layer.track(mean, squares, number)
        variance = squares / number
        ctx.layer, ctx.number = layer, number
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + layer.eps))
        if weight is not None:
            mean, variance = mean.to(weight.dtype), variance.to(weight.dtype)
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
            along_mean, along_scale = sums[0] / ctx.number, sums[1] * scale.square() / ctx.number
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
