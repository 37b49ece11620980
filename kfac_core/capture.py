"""Listens to a model's layers and sums what their factors are made of."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kfac_core.kernels.grams import Gram, Rows, dense
from kfac_core.kernels.packing import Packed, packed
from kfac_core.layers import KroneckerLayer

_NO_BACKWARD = -1  # what torch calls the backward pass while there is none


@dataclass(frozen=True)
class _Call:
    """Sums over the calls of a layer in one backward pass; calls of a shared module are positions."""

    task: int
    a_gram: Gram | Packed
    g_gram: Gram | Packed
    examples: int
    positions: float
    batch: int

    def with_another(self, call: _Call) -> _Call:
        """The two of one pass; an example that only one of them saw has fewer positions."""
        examples = max(self.examples, call.examples)
        seen = self.positions * self.examples + call.positions * call.examples
        return _Call(
            self.task,
            _sum(Share(self.a_gram, 1.0), Share(call.a_gram, 1.0)).gram,
            _sum(Share(self.g_gram, 1.0), Share(call.g_gram, 1.0)).gram,
            examples,
            seen / examples,
            max(self.batch, call.batch),
        )


class Share(NamedTuple):
    """`scale * gram`: what a rank adds to a factor, to be divided by the examples of all ranks."""

    gram: Gram | Packed
    scale: float


class Statistics:
    """One layer's sums over the backward passes since they were last cleared.

    Attributes:
        examples: examples behind them on this rank; fewer than the batch where only part of it counts.
        awaited: calls whose gradient has not arrived.
    """

    def __init__(self, loss_reduction: str) -> None:
        self.examples = self.awaited = self._batch = 0
        self._reduction = loss_reduction
        self._a_share: Share | None = None  # sum over passes of (sum of a aT) / S^2
        self._g_share: Share | None = None  # sum over passes of S (sum of g gT)
        self._open: _Call | None = None

    def add(self, call: _Call) -> None:
        """Add one call; its grams are left as they are, for a graph that is run through again."""
        if self._open is not None and self._open.task == call.task:
            self._open = self._open.with_another(call)
        else:
            self._close()
            self._open = call

    def shares(self) -> tuple[Share, Share] | None:
        """What this rank adds to (A, G); None without any.

        Under a mean loss an example's own gradient is B times its share of the mean's, and G takes B^2.
        """
        self._close()
        if self._a_share is None or self._g_share is None:
            return None
        scale = float(self._batch) ** 2 if self._reduction == "mean" else 1.0
        return self._a_share, Share(self._g_share.gram, self._g_share.scale * scale)

    def share(self, kind: Literal["a", "g"]) -> Share | None:
        """What this rank adds to one of them."""
        shares = self.shares()
        return shares[kind == "g"] if shares is not None else None

    def _close(self) -> None:
        """Scale the open pass by its positions, which are known only when it is over."""
        if self._open is None:
            return
        call, self._open = self._open, None
        self._a_share = _sum(self._a_share, Share(call.a_gram, 1.0 / call.positions**2))
        self._g_share = _sum(self._g_share, Share(call.g_gram, call.positions))
        self.examples += call.examples
        self._batch += call.batch


def _sum(before: Share | None, new: Share) -> Share:
    """Both added up; packed, where one of them is."""
    if before is None:
        return new
    if isinstance(before.gram, Packed) or isinstance(new.gram, Packed):
        old, more = packed(before.gram).triangle, packed(new.gram).triangle
        return Share(Packed(_added(old, before.scale, more, new.scale)), 1.0)
    return Share(_added(dense(before.gram), before.scale, dense(new.gram), new.scale), 1.0)


def _added(first: Tensor, first_scale: float, second: Tensor, second_scale: float) -> Tensor:
    return torch.add(first if first_scale == 1.0 else first * first_scale, second, alpha=second_scale)


class Capture:
    """Forward hooks on every layer; on listening steps also a hook on each output's gradient.

    A call counts only once its gradient has arrived, so forward passes without a backward, layers that take
    no part in what is differentiated, and the second forward pass of activation checkpointing add nothing.
    Whatever is differentiated counts, a gradient penalty's inner gradient too. A copy of the model has hooks
    that hear nothing.

    Args:
        layers: all layers, in the order of `statistics`.
        heard: positions of those whose factors see this rank's batch; the others get no hook.
        leaving: factors whose grams leave for other ranks and are packed as soon as they are made.
        dtype: dtype of the sums, at least float32.
        listening: asked in every forward pass; False costs one call a layer.
        measured: a context that each computation of a gram runs in, by the layer's position.
        loss_scale: factor by which the loss, and so every gradient, is larger than it should be; asked once
            between two clearings, as reading it waits for the device.
        is_last: asked in every forward pass: whether it is the last one before the sums are used.
        told: called after every gradient with the layer's position, and whether its sums are complete: the
            gradient of a last forward pass, and no other one on its way. None: nobody listens.
    """

    def __init__(
        self,
        layers: Sequence[KroneckerLayer],
        heard: Iterable[int],
        leaving: Container[tuple[int, str]],
        dtype: torch.dtype,
        listening: Callable[[], bool],
        measured: Callable[[int], AbstractContextManager[None]],
        loss_scale: Callable[[], float],
        is_last: Callable[[], bool],
        told: Callable[[int, bool], None] | None,
    ) -> None:
        self._layers = layers
        self._leaving = leaving
        self._dtype = dtype
        self._listening = listening
        self._measured = measured
        self._loss_scale = loss_scale
        self._is_last, self._told = is_last, told
        self.clear()
        self._handles = [
            layers[index].module.register_forward_hook(partial(self._on_forward, index), with_kwargs=True)
            for index in heard
        ]

    def clear(self) -> None:
        """Forget all sums."""
        self.statistics = [Statistics(layer.config.loss_reduction) for layer in self._layers]
        self._scale: float | None = None

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> tuple[Callable[[], Capture], tuple[()]]:
        """What a copied or saved model keeps of this: K-FAC stays with the original."""
        return _deaf, ()

    def _on_forward(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if not (module.training and self._listening() and torch.is_grad_enabled() and output.requires_grad):
            return
        if not module.weight.requires_grad:  # frozen meanwhile, as a discriminator while its generator learns
            return
        if not output.numel():
            return  # an expert without tokens: no examples
        inputs: Tensor = (args[0] if args else kwargs["input"]).detach()
        batch, positions = self._layers[index].positions(inputs, output)
        examples = self._examples(batch)
        if examples < batch:
            inputs = inputs[:examples]
        task = torch._C._current_graph_task_id()
        if task == _NO_BACKWARD:
            a_gram = partial(_given, self._input_gram(index, inputs))
        else:
            # A checkpoint recomputes the call. Only a reentrant one, whose first pass ran without gradients,
            # sends a gradient through what it recomputed, so the work waits until one arrives.
            a_gram = partial(self._input_gram, index, inputs)
        first = task == _NO_BACKWARD  # what is recomputed brings no gradient, or one that nobody could await
        self.statistics[index].awaited += first
        last, counts = first and self._is_last(), (examples, positions, batch)
        output.register_hook(partial(self._on_gradient, index, task, a_gram, counts, last))

    def _on_gradient(
        self,
        index: int,
        task: int,
        a_gram: Callable[[], Gram | Packed],
        counts: tuple[int, int, int],
        last: bool,
        gradient: Tensor | None,
    ) -> None:
        statistics = self.statistics[index]
        if task == _NO_BACKWARD:  # else a checkpoint's own backward pass is part of the one that began it
            task = torch._C._current_graph_task_id()
            statistics.awaited -= 1
        with torch.no_grad(), full_precision(self._layers[index].weight):
            if gradient is not None:  # None: what came after the layer gave it no gradient
                statistics.add(_Call(task, a_gram(), self._output_gram(index, gradient, counts), *counts))
            if self._told is not None:
                self._told(index, last and statistics.awaited <= 0)

    def _examples(self, batch: int) -> int:
        """How many of a batch's examples make the statistics."""
        fraction = self._layers[0].config.factor_batch_fraction
        return batch if fraction == 1.0 else max(1, round(batch * fraction))

    def _input_gram(self, index: int, inputs: Tensor) -> Gram | Packed:
        with self._measured(index), torch.no_grad(), full_precision(inputs):
            return self._gram(index, "a", self._cast(inputs))

    def _output_gram(self, index: int, gradient: Tensor, counts: tuple[int, int, int]) -> Gram | Packed:
        if self._scale is None:
            self._scale = self._loss_scale()
        examples, _, batch = counts
        with self._measured(index):
            g = self._cast(gradient.detach()[:examples] if examples < batch else gradient.detach())
            return self._gram(index, "g", g if self._scale == 1.0 else g / self._scale)

    def _gram(self, index: int, kind: str, tensor: Tensor) -> Gram | Packed:
        layer = self._layers[index]
        total = layer.input_gram(tensor) if kind == "a" else layer.output_gram(tensor)
        if isinstance(total, Rows):  # fewer elements than a triangle; multiplied straight into their place
            return total
        return packed(total) if (index, kind) in self._leaving else total

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def is_heard(module: nn.Module) -> bool:
    """Whether a `Capture` listens to this module; one that came with a copy of it does not."""
    listeners = [
        getattr(getattr(hook, "func", None), "__self__", None) for hook in module._forward_hooks.values()
    ]
    return any(isinstance(one, Capture) and one._listening is not _never for one in listeners)


def _deaf() -> Capture:
    one = Capture.__new__(Capture)
    one._listening = _never
    return one


def _never() -> bool:
    return False


def _given(gram: Gram | Packed) -> Gram | Packed:
    return gram


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """Autocast would turn matrix products back into half precision."""
    return torch.autocast(tensor.device.type, enabled=False)
