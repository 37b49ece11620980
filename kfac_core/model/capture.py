"""Hooks on a model's layers that sum the statistics of their factors."""

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

_NO_BACKWARD = -1  # torch's graph task id outside of any backward pass


@dataclass(frozen=True)
class _Call:
    """Sums over a layer's calls in one backward pass; several calls of one module count as positions."""

    task: int
    a_gram: Gram | Packed
    g_gram: Gram | Packed
    examples: int
    positions: float
    batch: int

    def merge(self, call: _Call) -> _Call:
        """Both calls of one pass; an example in only one of them has fewer positions."""
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
    """`scale * gram`: a rank's contribution to a factor, before division by the examples of all ranks."""

    gram: Gram | Packed
    scale: float


class Statistics:
    """One layer's sums over the backward passes since the last `Capture.clear`.

    Attributes:
        examples: examples in the sums on this rank; fewer than the batch where only part of it counts.
        pending_calls: calls whose gradient has not arrived.
    """

    def __init__(self, loss_reduction: str) -> None:
        self.examples = self.pending_calls = self._batch = 0
        self._reduction = loss_reduction
        self._a_share: Share | None = None  # sum over passes of (sum of a aT) / S^2
        self._g_share: Share | None = None  # sum over passes of S (sum of g gT)
        self._open: _Call | None = None

    def add(self, call: _Call) -> None:
        """Add one call; its grams are not modified, as a retained graph may use them again."""
        if self._open is not None and self._open.task == call.task:
            self._open = self._open.merge(call)
        else:
            self._close()
            self._open = call

    def shares(self) -> tuple[Share, Share] | None:
        """This rank's contributions to (A, G); None without statistics.

        With a mean loss, an example's own gradient is B times what it contributes to the mean's, so that G
        is scaled by B^2.
        """
        self._close()
        if self._a_share is None or self._g_share is None:
            return None
        scale = float(self._batch) ** 2 if self._reduction == "mean" else 1.0
        return self._a_share, Share(self._g_share.gram, self._g_share.scale * scale)

    def share(self, kind: Literal["a", "g"]) -> Share | None:
        """This rank's contribution to A or G; None without statistics."""
        shares = self.shares()
        return shares[kind == "g"] if shares is not None else None

    def _close(self) -> None:
        """Scale the current pass by its positions, which are known only when it is over."""
        if self._open is None:
            return
        call, self._open = self._open, None
        self._a_share = _sum(self._a_share, Share(call.a_gram, 1.0 / call.positions**2))
        self._g_share = _sum(self._g_share, Share(call.g_gram, call.positions))
        self.examples += call.examples
        self._batch += call.batch


def _sum(before: Share | None, new: Share) -> Share:
    """The sum of both; packed if one of them is."""
    if before is None:
        return new
    if isinstance(before.gram, Packed) or isinstance(new.gram, Packed):
        old, more = packed(before.gram).triangle, packed(new.gram).triangle
        return Share(Packed(_added(old, before.scale, more, new.scale)), 1.0)
    return Share(_added(dense(before.gram), before.scale, dense(new.gram), new.scale), 1.0)


def _added(first: Tensor, first_scale: float, second: Tensor, second_scale: float) -> Tensor:
    return torch.add(first if first_scale == 1.0 else first * first_scale, second, alpha=second_scale)


class Capture:
    """Forward hooks on every layer; on steps with a factor update also a hook on each output's gradient.

    A call counts only once its gradient has arrived. Forward passes without a backward pass, layers that the
    loss does not depend on, and the second forward pass of activation checkpointing therefore add nothing.
    Every backward pass counts, also the inner one of a gradient penalty. On a copy of the model the hooks do
    nothing.

    Args:
        layers: all layers, in the order of `statistics`.
        captured: positions of the layers whose factors include this rank's batch; others get no hook.
        packed_early: factors whose grams are sent to other ranks; they are packed as soon as computed.
        dtype: dtype of the sums, at least float32.
        is_active: called in every forward pass: whether it is captured. False costs one call per layer.
        timed: a context for each computation of a gram, from the layer's position.
        loss_scale: returns the factor by which the loss, and so every gradient, is scaled up; called once
            between two clearings, as reading it waits for the device.
        is_last: called in every forward pass: whether it is the last one before the sums are used.
        on_gradient: called after every gradient with the layer's position and whether its sums are complete:
            the gradient belongs to a last forward pass and no other one is pending. None for no callback.
    """

    def __init__(
        self,
        layers: Sequence[KroneckerLayer],
        captured: Iterable[int],
        packed_early: Container[tuple[int, str]],
        dtype: torch.dtype,
        is_active: Callable[[], bool],
        timed: Callable[[int], AbstractContextManager[None]],
        loss_scale: Callable[[], float],
        is_last: Callable[[], bool],
        on_gradient: Callable[[int, bool], None] | None,
    ) -> None:
        self._layers = layers
        self._packed_early = packed_early
        self._dtype = dtype
        self._is_active = is_active
        self._timed = timed
        self._loss_scale = loss_scale
        self._is_last, self._callback = is_last, on_gradient
        self.clear()
        self._handles = [
            layers[index].module.register_forward_hook(partial(self._on_forward, index), with_kwargs=True)
            for index in captured
        ]

    def clear(self) -> None:
        """Discard all sums."""
        self.statistics = [Statistics(layer.config.loss_reduction) for layer in self._layers]
        self._scale: float | None = None

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def __reduce__(self) -> tuple[Callable[[], Capture], tuple[()]]:
        """A copied or saved model gets hooks that do nothing: K-FAC stays with the original."""
        return _inactive, ()

    def _on_forward(
        self, index: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> None:
        if not (module.training and self._is_active() and torch.is_grad_enabled() and output.requires_grad):
            return
        if not module.weight.requires_grad:  # frozen for now, as a discriminator while its generator learns
            return
        if not output.numel():
            return  # no examples, as in an expert without tokens
        inputs: Tensor = (args[0] if args else kwargs["input"]).detach()
        batch, positions = self._layers[index].positions(inputs, output)
        examples = self._examples(batch)
        if examples < batch:
            inputs = inputs[:examples]
        task = torch._C._current_graph_task_id()
        if task == _NO_BACKWARD:
            a_gram = partial(_identity, self._input_gram(index, inputs))
        else:
            # A checkpoint recomputes the call. Only a reentrant one, whose first pass ran without gradients,
            # sends a gradient through the recomputed call, so its gram is computed when one arrives.
            a_gram = partial(self._input_gram, index, inputs)
        first = task == _NO_BACKWARD  # a recomputed call gets no gradient, or one that cannot be foreseen
        self.statistics[index].pending_calls += first
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
        if task == _NO_BACKWARD:  # a checkpoint's own backward pass counts as part of the outer one
            task = torch._C._current_graph_task_id()
            statistics.pending_calls -= 1
        with torch.no_grad(), full_precision(self._layers[index].weight):
            if gradient is not None:  # None: later operations gave the output no gradient
                statistics.add(_Call(task, a_gram(), self._output_gram(index, gradient, counts), *counts))
            if self._callback is not None:
                self._callback(index, last and statistics.pending_calls <= 0)

    def _examples(self, batch: int) -> int:
        """How many of a batch's examples enter the statistics."""
        fraction = self._layers[0].config.factor_batch_fraction
        return batch if fraction == 1.0 else max(1, round(batch * fraction))

    def _input_gram(self, index: int, inputs: Tensor) -> Gram | Packed:
        with self._timed(index), torch.no_grad(), full_precision(inputs):
            return self._gram(index, "a", self._cast(inputs))

    def _output_gram(self, index: int, gradient: Tensor, counts: tuple[int, int, int]) -> Gram | Packed:
        if self._scale is None:
            self._scale = self._loss_scale()
        examples, _, batch = counts
        with self._timed(index):
            g = self._cast(gradient.detach()[:examples] if examples < batch else gradient.detach())
            return self._gram(index, "g", g if self._scale == 1.0 else g / self._scale)

    def _gram(self, index: int, kind: str, tensor: Tensor) -> Gram | Packed:
        layer = self._layers[index]
        total = layer.input_gram(tensor) if kind == "a" else layer.output_gram(tensor)
        if isinstance(total, Rows):  # fewer elements than a triangle; later multiplied straight into place
            return total
        return packed(total) if (index, kind) in self._packed_early else total

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def is_captured(module: nn.Module) -> bool:
    """Whether an active `Capture` has a hook on this module; one that was copied with it is inactive."""
    owners = [
        getattr(getattr(hook, "func", None), "__self__", None) for hook in module._forward_hooks.values()
    ]
    return any(isinstance(owner, Capture) and owner._is_active is not _never for owner in owners)


def _inactive() -> Capture:
    capture = Capture.__new__(Capture)
    capture._is_active = _never
    return capture


def _never() -> bool:
    return False


def _identity(gram: Gram | Packed) -> Gram | Packed:
    return gram


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """A context without autocast, which would compute matrix products in half precision."""
    return torch.autocast(tensor.device.type, enabled=False)
