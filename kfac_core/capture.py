"""Listens to a model's layers and sums what their factors are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfac_core.layers import KroneckerLayer


@dataclass
class _Pass:
    """Sums over the calls of one layer in one backward pass; calls of a shared module are positions."""

    task: int
    a_gram: Tensor
    g_gram: Tensor
    examples: int
    positions: int


class Statistics:
    """One layer's sums over the backward passes since they were last cleared.

    Attributes:
        examples: examples B behind them on this rank.
    """

    def __init__(self, loss_reduction: str) -> None:
        self.examples = 0
        self._reduction = loss_reduction
        self._a_sum: Tensor | None = None  # sum over passes of (sum of a aT) / S^2
        self._g_sum: Tensor | None = None  # sum over passes of S (sum of g gT)
        self._open: _Pass | None = None

    def add(self, call: _Pass) -> None:
        """Add one call, whose tensors this object may keep and change."""
        if self._open is not None and self._open.task == call.task:
            self._open.a_gram += call.a_gram
            self._open.g_gram += call.g_gram
            self._open.positions += call.positions
        else:
            self._close()
            self._open = call

    def contributions(self) -> tuple[Tensor, Tensor] | None:
        """What this rank adds to (A, G), to be divided by the examples of all ranks; None without any.

        Under a mean loss an example's own gradient is B times its share of the mean's, and G takes B^2.
        """
        self._close()
        if self._a_sum is None or self._g_sum is None:
            return None
        scale = float(self.examples) ** 2 if self._reduction == "mean" else 1.0
        return self._a_sum, self._g_sum * scale

    def _close(self) -> None:
        """Scale the open pass by its positions, which are known only when it is over."""
        if self._open is None:
            return
        a_sum = self._open.a_gram.div_(self._open.positions**2)
        g_sum = self._open.g_gram.mul_(self._open.positions)
        self._a_sum = a_sum if self._a_sum is None else self._a_sum.add_(a_sum)
        self._g_sum = g_sum if self._g_sum is None else self._g_sum.add_(g_sum)
        self.examples += self._open.examples
        self._open = None


class Capture:
    """Forward hooks on every layer; on listening steps also a hook on each output's gradient.

    A call counts only once its gradient has arrived, so layers that take no part in the loss, forward
    passes without a backward, and the second forward pass of activation checkpointing add nothing.

    Args:
        layers: the layers to listen to.
        dtype: dtype of the sums, at least float32.
        listening: asked in every forward pass; False costs one call a layer.
        measured: a context that each computation of a gram runs in.
        loss_scale: factor by which the loss, and so every gradient, is larger than it should be.
    """

    def __init__(
        self,
        layers: Sequence[KroneckerLayer],
        dtype: torch.dtype,
        listening: Callable[[], bool],
        measured: Callable[[], AbstractContextManager[None]],
        loss_scale: Callable[[], float],
    ) -> None:
        self._layers = layers
        self._dtype = dtype
        self._listening = listening
        self._measured = measured
        self._loss_scale = loss_scale
        self.clear()
        self._handles = [
            layer.module.register_forward_hook(partial(self._on_forward, index))
            for index, layer in enumerate(layers)
        ]

    def clear(self) -> None:
        """Forget all sums."""
        self.statistics = [Statistics(layer.config.loss_reduction) for layer in self._layers]
        self._pending = [0] * len(self._layers)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _on_forward(self, index: int, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if not (module.training and self._listening() and torch.is_grad_enabled() and output.requires_grad):
            return
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and self._pending[index]:
            return  # a checkpoint recomputes a call whose first pass is being listened to already
        layer, inputs = self._layers[index], args[0].detach()
        with self._measured(), torch.no_grad(), _full_precision(inputs):
            a_gram = layer.input_gram(self._cast(inputs)).to(self._dtype)
        self._pending[index] += 1
        examples, positions = layer.positions(inputs, output)
        output.register_hook(partial(self._on_gradient, index, a_gram, examples, positions))

    def _on_gradient(
        self, index: int, a_gram: Tensor, examples: int, positions: int, gradient: Tensor
    ) -> None:
        self._pending[index] -= 1
        with self._measured(), torch.no_grad(), _full_precision(gradient):
            g = self._cast(gradient.detach())
            loss_scale = self._loss_scale()
            if loss_scale != 1.0:
                g = g / loss_scale
            g_gram = self._layers[index].output_gram(g).to(self._dtype)
        task = torch._C._current_graph_task_id()
        self.statistics[index].add(_Pass(task, a_gram, g_gram, examples, positions))

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """Autocast would turn the products of a gram back into half precision."""
    return torch.autocast(tensor.device.type, enabled=False)
