"""How many loss terms a backward pass averages: the examples of its batch, or its tokens.

The Fisher of a mean over N loss terms is the same for every layer and in every layout of the batch only if
all layers count the same N. It is therefore read once a forward pass, from the model's inputs and outputs,
and never from a layer's own input: windows of an image, tokens of an expert and `[B * T, F]` have another
leading dimension.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kfac_core.errors import ConfigError
from kfac_core.layers import KroneckerLayer


class _LastCall(NamedTuple):
    """The layer that a forward pass called last: what the loss is made of, where nothing else tells."""

    spatial: bool
    examples: int
    rows: int
    sizes: torch.Size


class ForwardPass:
    """One forward pass of the model.

    Attributes:
        batch: examples, from the model's first input; None where it is not known.
    """

    def __init__(self, batch: int | None) -> None:
        self.batch = batch
        self._last: _LastCall | None = None
        self._sizes: torch.Size | None = None  # of the model's output
        self._of_model = batch is not None
        self.is_over = False

    def call(self, layer: KroneckerLayer, examples: int, rows: int, output: Tensor) -> None:
        """Note the call of a layer."""
        self._last = _LastCall(layer.is_spatial, examples, rows, output.shape)
        if not self._of_model:
            self._sizes = output.shape

    def end(self, output: Any) -> None:
        """Note the model's output: a tensor, or what holds one."""
        self._of_model = True
        found = output if isinstance(output, Tensor) else _scores(output)
        self._sizes = found.shape if found is not None else None

    def terms(self, stated: str | None, batch_dim: int) -> tuple[int, str] | None:
        """How many loss terms, and which; None where neither output nor layers tell."""
        last, sizes = self._last, self._sizes
        if last is None or sizes is None:
            return None
        if last.spatial:
            return (last.rows, "token") if stated == "token" else (last.examples, "example")
        sizes = sizes or last.sizes  # () if the model returned its loss
        if len(sizes) < 2:  # of one example, or one score of each
            return (sizes.numel() if len(last.sizes) > 1 else 1), stated or "example"
        tokens, sequences = sizes[:-1].numel(), len(sizes) > 2
        if stated == "token" or (stated is None and sequences and sizes[-1] == last.sizes[-1]):
            return tokens, "token"
        flat = stated is not None and self.batch and tokens % self.batch == 0  # [B * T, features]
        return sizes[batch_dim] if sequences else self.batch if flat and self.batch else tokens, "example"


class LossTerms:
    """Counts the loss terms of the backward passes since the last `clear`.

    Args:
        layers: all layers, in the order of their statistics.
        captured_share: of the loss terms, those of the backward passes that are captured; the others are not
            seen here, but the loss is a mean over them too.
    """

    def __init__(self, layers: Sequence[KroneckerLayer], model: nn.Module, captured_share: float) -> None:
        config = self._config = layers[0].config
        self._names, self._model = [layer.name for layer in layers], model
        self._logged, self._captured_share = False, captured_share
        self._inside: dict[str, list[int]] = {}
        self._batch_dim = 1 if config.batch_dim is None and _is_time_major(model) else config.batch_dim or 0
        self._fraction = config.factor_batch_fraction
        self.clear()

    def clear(self) -> None:
        """Forget all passes."""
        self._stated: float | None = None
        self._stated_of: Mapping[int, float] = {}
        self.current: ForwardPass | None = None
        self._by_task: dict[int, tuple[float, float]] = {}
        self._by_task_of: dict[int, dict[int, tuple[float, float]]] = {}

    def state(self, count: float, of: Mapping[str, float]) -> None:
        """State the loss terms of each backward pass from now on, as `KFAC.set_loss_terms` says.

        Raises:
            ConfigError: the model has no such module.
        """
        self._stated = count
        self._stated_of = {layer: terms for name, terms in of.items() for layer in self._layers_in(name)}

    def begin(self, inputs: Iterable[Any]) -> None:
        """The model's own forward pass starts."""
        self.current = ForwardPass(_examples(inputs, self._batch_dim))

    def of_layer(self, *, recomputed: bool) -> ForwardPass:
        """The forward pass that a layer's call belongs to: after a backward pass a new one.

        What a checkpoint recomputes belongs to the pass before.
        """
        if self.current is None or (self.current.is_over and not recomputed):
            self.current = ForwardPass(None)
        return self.current

    def count(self, task: int, forward: ForwardPass) -> bool:
        """Count a gradient of this backward pass; returns whether its loss terms are known.

        Several forward passes in one backward pass, as of a model that compares two inputs, are positions
        of the same loss terms.
        """
        forward.is_over = True
        if self._stated is not None:
            terms: float = self._stated
        elif (found := forward.terms(self._config.loss_terms, self._batch_dim)) is None:
            self._log(None, "examples")
            return False
        else:
            terms = found[0]
            self._log(*found)
        share = self._share(forward.batch)
        _note(self._by_task, task, terms, share)
        for layer, own in self._stated_of.items():  # also where this pass does not reach the layer
            _note(self._by_task_of.setdefault(layer, {}), task, own, share)
        return True

    def totals(self, layer: int) -> tuple[float, float]:
        """Loss terms of a layer whose statistics count, and all that the loss is a mean over."""
        passes = self._by_task_of.get(layer, self._by_task).values()
        counted, whole = zip(*passes, strict=True) if passes else ((), ())
        return sum(counted), self.of_all_passes(sum(whole))

    def of_all_passes(self, terms: float) -> float:
        """The loss terms of all backward passes, from those of the captured ones."""
        return terms / self._captured_share

    def _layers_in(self, name: str) -> list[int]:
        """Positions of the layers that are this module or inside of it."""
        if name not in self._inside:
            if name not in {known for known, _ in self._model.named_modules()}:
                raise ConfigError(f"set_loss_terms: the model has no module {name!r}")
            inside = (f"{each}.".startswith(f"{name}.") for each in self._names)
            self._inside[name] = [layer for layer, is_inside in enumerate(inside) if is_inside]
        return self._inside[name]

    def _share(self, batch: int | None) -> float:
        """The share of a batch that enters the statistics: whole examples."""
        if self._fraction == 1.0 or not batch:
            return self._fraction
        return max(1, round(batch * self._fraction)) / batch

    def _log(self, terms: int | None, kind: str) -> None:
        if self._logged:
            return
        self._logged = True
        how = "as stated" if self._config.loss_terms else "detected; loss_terms states it"
        counts = f"{terms} in the first pass" if terms is not None else "each layer counts its own"
        logging.getLogger("kfac_core").info(
            "loss terms are %ss (%s), %s; batch dimension %d", kind.removesuffix("s"), how, counts,
            self._batch_dim,
        )  # fmt: skip


def _note(passes: dict[int, tuple[float, float]], task: int, terms: float, share: float) -> None:
    """Note one gradient's loss terms of a backward pass, of which a share counts."""
    counted, whole = passes.get(task, (0.0, 0.0))
    passes[task] = max(counted, terms * share), max(whole, terms)


def _is_time_major(model: nn.Module) -> bool:
    """Whether the model itself is one of torch's that take `[T, B, features]`."""
    return getattr(model, "batch_first", True) is False


def _examples(inputs: Iterable[Any], batch_dim: int) -> int | None:
    """Size of the batch dimension of the first tensor, or the length of a list of examples."""
    for value in inputs:
        if isinstance(value, Tensor):
            return value.shape[batch_dim] if value.ndim > batch_dim else None
        if isinstance(value, Mapping):
            return _examples(value.values(), batch_dim)
        if isinstance(value, list | tuple) and value:
            return len(value) if isinstance(value, list) else _examples(value, batch_dim)
    return None


def _scores(output: Any) -> Tensor | None:
    """The first tensor of scores in a mapping, tuple or record; None where there are only losses."""
    if isinstance(output, Mapping):
        values = [output["logits"]] if "logits" in output else list(output.values())
    elif isinstance(output, tuple | list):
        values = list(output)
    else:
        values = [getattr(output, name, None) for name in ("logits", "last_hidden_state")]
    return next((v for v in values if isinstance(v, Tensor) and v.ndim and v.is_floating_point()), None)
