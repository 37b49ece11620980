"""Listens to a model's layers and sums what their factors are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kfac_core.layers import KroneckerLayer


class Statistics:
    """One layer's sums since they were last cleared.

    Attributes:
        a_sum: sum over calls of (sum of a aT) / S^2, `[blocks, n_a, n_a]`, None before the first call.
        g_sum: sum over calls of S (sum of g gT), `[blocks, n_g, n_g]`, None before the first call.
        examples: examples B behind them on this rank.
    """

    def __init__(self) -> None:
        self.a_sum: Tensor | None = None
        self.g_sum: Tensor | None = None
        self.examples = 0

    def add(self, a_gram: Tensor, g_gram: Tensor, examples: int, positions: int) -> None:
        """Add one call's grams, which this object may keep and change."""
        a_gram /= positions**2
        g_gram *= positions
        self.a_sum = a_gram if self.a_sum is None else self.a_sum.add_(a_gram)
        self.g_sum = g_gram if self.g_sum is None else self.g_sum.add_(g_gram)
        self.examples += examples

    @property
    def contributions(self) -> tuple[Tensor, Tensor] | None:
        """What this rank adds to (A, G); to be divided by the examples of all ranks.

        Gradients are those of the batch mean, so the examples' own are B times larger, and G takes B^2.
        """
        if self.a_sum is None or self.g_sum is None:
            return None
        return self.a_sum, self.g_sum * float(self.examples) ** 2


class Capture:
    """Forward hooks on every layer; on listening steps also a hook on each output's gradient.

    A call counts only once its gradient has arrived, so layers that take no part in the loss, forward
    passes without a backward, and the second forward pass of activation checkpointing add nothing.

    Args:
        layers: the layers to listen to.
        dtype: dtype of the sums, at least float32.
        listening: asked in every forward pass; False costs one call a layer.
        measured: a context that each computation of a gram runs in.
    """

    def __init__(
        self,
        layers: Sequence[KroneckerLayer],
        dtype: torch.dtype,
        listening: Callable[[], bool],
        measured: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.statistics = [Statistics() for _ in layers]
        self._dtype = dtype
        self._listening = listening
        self._measured = measured
        self._pending = [0] * len(layers)
        self._handles = [
            layer.module.register_forward_hook(partial(self._on_forward, index, layer))
            for index, layer in enumerate(layers)
        ]

    def clear(self) -> None:
        """Forget all sums."""
        self.statistics = [Statistics() for _ in self.statistics]
        self._pending = [0] * len(self._pending)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _on_forward(
        self, index: int, layer: KroneckerLayer, module: nn.Module, args: tuple[Any, ...], output: Tensor
    ) -> None:
        if not (module.training and self._listening() and torch.is_grad_enabled() and output.requires_grad):
            return
        in_backward = torch._C._current_graph_task_id() != -1
        if in_backward and self._pending[index]:
            return  # a checkpoint recomputes a call whose first pass is being listened to already
        inputs: Tensor = args[0].detach()
        with self._measured(), torch.no_grad():
            a_gram = layer.input_gram(inputs.to(self._dtype))
        self._pending[index] += 1
        examples, positions = layer.positions(inputs, output)
        output.register_hook(partial(self._on_gradient, index, layer, a_gram, examples, positions))

    def _on_gradient(
        self,
        index: int,
        layer: KroneckerLayer,
        a_gram: Tensor,
        examples: int,
        positions: int,
        gradient: Tensor,
    ) -> None:
        self._pending[index] -= 1
        with self._measured(), torch.no_grad():
            g_gram = layer.output_gram(gradient.detach().to(self._dtype))
            self.statistics[index].add(a_gram, g_gram, examples, positions)
