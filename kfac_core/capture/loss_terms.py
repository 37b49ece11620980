"""How many loss terms a backward pass averages: the examples of its batch, or its tokens.

The Fisher of a mean over N loss terms is the same for every layer and in every layout of the batch only if
all layers count the same N. It is therefore read once a forward pass, from the model's inputs and outputs,
and never from a layer's own input: windows of an image, tokens of an expert and `[B * T, F]` have another
leading dimension. Which output it is tells the last layer that was called, also one that K-FAC does not take.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from kfac_core.capture.forward_pass import ForwardPass, examples_in
from kfac_core.errors import ConfigError
from kfac_core.layers import KroneckerLayer


class LossTerms:
    """Counts the loss terms of the backward passes since the last `clear`.

    Args:
        layers: all layers, in the order of their statistics.
        captured_share: of the loss terms, those of the backward passes that are captured; the others are not
            seen here, but the loss is a mean over them too.

    Attributes:
        current: the forward pass that calls belong to; None where none is captured.
    """

    current: ForwardPass | None = None
    _running: ForwardPass | None = None  # the current one, while the model's own forward pass lasts

    def __init__(self, layers: Sequence[KroneckerLayer], model: nn.Module, captured_share: float) -> None:
        config = self._config = layers[0].config
        self._names, self._model = [layer.name for layer in layers], model
        self._logged, self._captured_share = False, captured_share
        self._warnings: list[str] = []
        self._guessed = False
        self._inside: dict[str, list[int]] = {}
        self._batch_dim = 1 if config.batch_dim is None and _is_time_major(model) else config.batch_dim or 0
        self._fraction = config.factor_batch_fraction
        self.clear()

    def clear(self) -> None:
        """Forget all passes, and what was stated."""
        self._stated: float | None = None
        self._stated_of: Mapping[int, float] = {}
        self.current = self._running = None
        self._by_task: dict[int, tuple[float, float]] = {}
        self._by_task_of: dict[int, dict[int, tuple[float, float]]] = {}

    def state(self, count: float, of: Mapping[str, float]) -> None:
        """State the loss terms of each backward pass from now on, as `KFAC.set_loss_terms` says.

        Raises:
            ConfigError: the model has no such module; a count is not a number, or below 0.
        """
        for terms in (count, *of.values()):
            if isinstance(terms, bool) or not isinstance(terms, int | float) or not 0 <= terms < math.inf:
                raise ConfigError(f"set_loss_terms: {terms!r} must be a finite number of loss terms >= 0")
        self._stated = count
        self._stated_of = {layer: terms for name, terms in of.items() for layer in self._layers_in(name)}

    def begin(self, inputs: Iterable[Any]) -> None:
        """The model's own forward pass starts."""
        self.current = self._running = ForwardPass(examples_in(inputs, self._batch_dim))

    @property
    def is_running(self) -> bool:
        """Whether a forward pass of the model that counts has begun and not ended."""
        return self._running is not None

    def begin_other(self) -> None:
        """A forward pass of the model starts that does not count."""
        self._running = None

    def end(self, output: Any) -> None:
        """The model's own forward pass ends, if it counts."""
        if self._running is not None:
            self._running.end(output)
            self._running = None

    def warnings(self) -> list[str]:
        """What is to be said of the count, once."""
        said, self._warnings = self._warnings, []
        return said

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
            self._warn_of_guess("as each layer's own examples", "the model returns no tensor of scores")
            return False
        else:
            terms = found.terms
            self._log(found.terms, found.kind)
            self._warn_of_guess(f"{found.terms} {found.kind}s", found.guess)
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

    def _warn_of_guess(self, count: str, why: str | None) -> None:
        if why is None or self._guessed:
            return
        self._guessed = True
        options = "" if self._config.loss_terms else ", or set loss_terms to example or token"
        self._warnings.append(
            f"K-FAC: the number of loss terms is guessed, {count}: {why}; state it by "
            f"kfac.set_loss_terms(n) before each backward pass{options}"
        )

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
