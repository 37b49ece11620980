"""Whether the model is still the one that K-FAC was made for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from kfac_core.errors import ConfigError
from kfac_core.gradients.sharded import is_sharded
from kfac_core.layers import KroneckerLayer, find_layers
from kfac_core.layers.names import layer_text, listed_layers

_REMEDY = "call kfac.refresh(), which keeps the factors of layers that did not change"


class ModelChanges:
    """Compares the model with itself at construction: at each step one pass over its parameters, on the host.

    Args:
        model: the model without wrappers.
        layers: those that K-FAC takes.
        device: theirs.
    """

    def __init__(self, model: nn.Module, layers: Sequence[KroneckerLayer], device: torch.device) -> None:
        self._model, self._layers, self._device = model, layers, device
        self._shapes = [layer.weight.shape for layer in layers]
        self._known = {id(p) for p in _parameters(model) if p.requires_grad}
        self._taken = {(layer.name, id(layer.module)): layer.has_bias for layer in layers}
        self._sharded = [is_sharded(layer.weight) for layer in layers]
        self._seen = self._fingerprint()

    def warnings(self) -> list[str]:
        """Of layers, projections and biases that were added or unfrozen since; each once.

        Raises:
            ConfigError: a layer that K-FAC takes was replaced, resized, sharded or moved to another device,
                or its weight is computed now.
        """
        self._check_computed()
        device = self._layers[0].weight.device
        if device != self._device:
            raise ConfigError(
                f"the model was on {self._device} when KFAC was made and is on {device} now: make KFAC "
                "after the model has been moved"
            )
        for layer, shape in zip(self._layers, self._shapes, strict=True):
            if layer.weight.shape != shape:
                raise ConfigError(
                    f"the weight of {layer_text(layer.name)} was {list(shape)} when KFAC was made and is "
                    f"{list(layer.weight.shape)} now: {_REMEDY}"
                )
        fingerprint = self._fingerprint()
        if fingerprint == self._seen:
            return []
        self._seen = fingerprint
        self._check_replaced()
        self._check_sharded()
        return self._new()

    def _check_replaced(self) -> None:
        now = dict(self._model.named_modules(remove_duplicate=False))
        for layer in self._layers:
            name = layer.module_name
            if now.get(name) is not layer.module:
                kind = type(now[name]).__name__ if name in now else "nothing"
                raise ConfigError(
                    f"{layer_text(layer.name)} was replaced by {kind} since KFAC was made: {_REMEDY}"
                )

    def _check_computed(self) -> None:
        for layer in self._layers:
            if not layer.has_weight:
                raise ConfigError(
                    f"the weight of {layer_text(layer.name)} was a parameter when KFAC was made and is "
                    "computed now, as by pruning, weight norm or another parametrisation: make that "
                    "permanent (such as prune.remove), or call kfac.refresh(), which leaves the layer out"
                )

    def _check_sharded(self) -> None:
        for layer, sharded in zip(self._layers, self._sharded, strict=True):
            if is_sharded(layer.weight) and not sharded:
                raise ConfigError(
                    f"the weight of {layer_text(layer.name)} was sharded since KFAC was made: make KFAC "
                    "after fully_shard"
                )

    def _new(self) -> list[str]:
        """Nothing is searched where each trained parameter is known, as while a generator learns by turns."""
        trained = {id(p) for p in _parameters(self._model) if p.requires_grad}
        new = trained - self._known
        if not new:
            return []
        self._known |= new
        names = []
        for layer in self._now():
            before = self._taken.get((layer.name, id(layer.module)))
            if before is None and any(id(each) in new for each in layer.parameters()):
                names.append(layer.name)
            elif before is False and layer.has_bias:
                names.append(f"the bias of {layer.name}".strip())
        if not names:
            return []
        return [
            f"K-FAC: {listed_layers(names)} added or unfrozen since KFAC was made, and keeps its plain "
            "gradient: call kfac.refresh() to take it"
        ]

    def _now(self) -> list[KroneckerLayer]:
        """The layers that K-FAC would take now; none where a pattern of `skip` has lost its layer."""
        try:
            return find_layers(self._model, self._layers[0].config)
        except ConfigError:
            return []

    def _fingerprint(self) -> list[tuple[int, bool]]:
        return [(id(parameter), parameter.requires_grad) for parameter in _parameters(self._model)]


def _parameters(model: nn.Module) -> Iterator[Tensor]:
    """As `Module.parameters`, with repetitions and without their cost."""
    stack: list[nn.Module] = [model]
    while stack:
        module = stack.pop()
        yield from (parameter for parameter in module._parameters.values() if parameter is not None)
        stack.extend(child for child in module._modules.values() if child is not None)
