"""Observes `functional.linear` while a module runs that applies its weights without modules of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core.layers.projection import ProjectionLayer

Observe = Callable[[Sequence[tuple[int, slice]], Tensor, Tensor], None]
"""Takes layers with their columns of the output, the input, and the output."""


class Listener:
    """Replaces `functional.linear` during the forward passes of modules that call it.

    A mode of `torch.overrides` would be told of attention as a whole, not of the products inside it. Other
    threads' calls pass through unobserved.

    Args:
        layers: positions and layers, of any number of host modules.
        is_active: asked at the start of each forward pass.
        observed: told of every product of a layer's weight.
    """

    def __init__(
        self, layers: Sequence[tuple[int, ProjectionLayer]], is_active: Callable[[], bool], observed: Observe
    ) -> None:
        self._is_active, self._observe = is_active, observed
        self._of_host: dict[int, list[tuple[int, ProjectionLayer]]] = {}
        for index, layer in layers:
            self._of_host.setdefault(id(layer.host), []).append((index, layer))
        self._of_weight: dict[int, list[tuple[int, ProjectionLayer]]] = {}
        self._plain = functional.linear
        self._depth, self._thread = 0, 0
        hosts = {id(layer.host): layer.host for _, layer in layers}.values()
        self.handles = [
            handle
            for host in hosts
            for handle in (
                host.register_forward_pre_hook(self._start),
                host.register_forward_hook(self._stop, always_call=True),
            )
        ]

    def __reduce__(self) -> tuple[Callable[[], Listener], tuple[()]]:
        """A copied or saved model gets hooks that do nothing."""
        return _inactive, ()

    @property
    def is_copy(self) -> bool:
        """Whether this does nothing, as a copy."""
        return not self._of_host

    def _start(self, module: nn.Module, args: Any) -> None:
        if module.training and torch.is_grad_enabled() and self._is_active():
            self._depth += 1
            if self._depth == 1:
                self._thread = threading.get_ident()
                functional.linear = self._linear
                self._of_weight = {}
            self._of_weight |= _by_weight(self._of_host[id(module)])  # fully_shard puts others in their place

    def _stop(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth = max(0, self._depth - 1)
        if not self._depth and functional.linear == self._linear:
            functional.linear = self._plain

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output: Tensor = self._plain(input, weight, bias)
        if threading.get_ident() == self._thread:
            used = self._layers_of(weight)
            if used and output.requires_grad and output.numel():
                self._observe(used, input, output)
        return output

    def _layers_of(self, weight: Tensor) -> list[tuple[int, slice]]:
        """The layers whose rows lie in this weight, or view of one, with their columns of the output."""
        whole = weight._base if weight._base is not None else weight
        layers = self._of_weight.get(id(whole))
        if not layers or weight.ndim != 2 or weight.stride() != (whole.shape[-1], 1):
            return []
        first = (weight.storage_offset() - whole.storage_offset()) // whole.shape[-1]
        return [
            (index, slice(layer.rows[0] - first, layer.rows[1] - first))
            for index, layer in layers
            if layer.rows[0] >= first and layer.rows[1] <= first + len(weight) and layer.is_trained
        ]


def _by_weight(layers: Sequence[tuple[int, ProjectionLayer]]) -> dict[int, list[tuple[int, ProjectionLayer]]]:
    found: dict[int, list[tuple[int, ProjectionLayer]]] = {}
    for index, layer in layers:
        found.setdefault(id(layer.weight), []).append((index, layer))
    return found


def _inactive() -> Listener:
    return Listener([], bool, _ignore)


def _ignore(used: Sequence[tuple[int, slice]], inputs: Tensor, output: Tensor) -> None:
    """Nobody is told."""
