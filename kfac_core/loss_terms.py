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
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from kfac_core.errors import ConfigError
from kfac_core.layers import LAYERS, KroneckerLayer, ProjectionLayer, TiedEmbeddingLayer
from kfac_core.layers.layer import strided, unwrapped_name


class LossTerms:
    """Counts the loss terms of the backward passes since the last `clear`.

    Args:
        layers: all layers, in the order of their statistics.
        captured_share: of the loss terms, those of the backward passes that are captured; the others are not
            seen here, but the loss is a mean over them too.

    Attributes:
        current: the forward pass that calls belong to; None where none is captured.
        inner: the backward passes that make a graph of their own (`create_graph=True`).
    """

    current: ForwardPass | None = None
    _running: ForwardPass | None = None  # the current one, while the model's own forward pass lasts

    def __init__(self, layers: Sequence[KroneckerLayer], model: nn.Module, captured_share: float) -> None:
        config = self._config = layers[0].config
        self._names, self._model = [layer.name for layer in layers], model
        self._logged, self._captured_share = False, captured_share
        self._warnings: list[str] = []
        self._guessed = self._named_inner = False
        self._inside: dict[str, list[int]] = {}
        self._batch_dim = 1 if config.batch_dim is None and _is_time_major(model) else config.batch_dim or 0
        self._fraction = config.factor_batch_fraction
        self.clear()

    def clear(self) -> None:
        """Forget all passes, and what was stated."""
        self._stated: float | None = None
        self._stated_of: Mapping[int, float] = {}
        self.current = self._running = None
        self.forget_backward_passes()

    def forget_backward_passes(self) -> None:
        """Forget the backward passes; the forward pass that goes on and what was stated hold."""
        self._by_task: dict[int, tuple[float, float]] = {}
        self._by_task_of: dict[int, dict[int, tuple[float, float]]] = {}
        self.inner: set[int] = set()

    def state(self, count: float, of: Mapping[str, float]) -> None:
        """State the loss terms of each backward pass from now on, as `KFAC.set_loss_terms` says.

        Raises:
            ConfigError: the model has no such module; a count is not a number, or below 0.
        """
        self._stated = _terms(count)
        self._stated_of = {
            layer: _terms(terms) for name, terms in of.items() for layer in self._layers_in(name)
        }

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
        if self.inner and len(self._by_task) > len(self.inner) and not self._named_inner:
            self._named_inner = True
            said.append(
                "K-FAC: a backward pass with create_graph=True counts as a batch beside the loss's own: run "
                "the inner pass of a gradient penalty or a Hessian product in kfac.paused()"
            )
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
            plain = unwrapped_name(name)
            if plain not in {unwrapped_name(known) for known, _ in self._model.named_modules()}:
                raise ConfigError(f"set_loss_terms: the model has no module {name!r}")
            inside = (f"{each}.".startswith(f"{plain}.") for each in self._names)
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


def _terms(count: object) -> float:
    number = count.item() if isinstance(count, Tensor) and count.numel() == 1 else count
    if isinstance(number, bool) or not isinstance(number, Real) or not 0 <= float(number) < math.inf:
        raise ConfigError(f"set_loss_terms: {count!r} must be a finite number of loss terms >= 0")
    return float(number)


def _note(passes: dict[int, tuple[float, float]], task: int, terms: float, share: float) -> None:
    """Note one gradient's loss terms of a backward pass, of which a share counts."""
    counted, whole = passes.get(task, (0.0, 0.0))
    passes[task] = max(counted, terms * share), max(whole, terms)


def _is_time_major(model: nn.Module) -> bool:
    """Whether the model itself is one of torch's that take `[T, B, features]`."""
    return getattr(model, "batch_first", True) is False


# ------------------------------------------------------------
# What one forward pass shows of its loss terms: the model's output, and the layer that it comes from.


class Count(NamedTuple):
    """Loss terms of a forward pass.

    Attributes:
        kind: `token` or `example`.
        guess: why other numbers are as likely; None where the output and the layers agree.
    """

    terms: int
    kind: str
    guess: str | None = None


class LayerCall(NamedTuple):
    """A layer's call, also of one that is not captured: the last one is what the loss is made of.

    Attributes:
        features: size of its output's dimension that is neither examples nor positions.
        sizes: of its output.
        recomputed: by a checkpoint, in the backward pass.
    """

    spatial: bool
    examples: int
    features: int
    sizes: torch.Size
    recomputed: bool


class ForwardPass:
    """One forward pass of the model.

    Attributes:
        batch: examples, from the model's first input; None where it is not known.
        is_over: whether a gradient of it has arrived.
    """

    def __init__(self, batch: int | None) -> None:
        self.batch = batch
        self._last: LayerCall | None = None
        self._sizes: torch.Size | None = None  # of the model's output
        self._of_model = batch is not None
        self.is_over = self._is_ragged = False

    @property
    def is_empty(self) -> bool:
        """Whether the model's output has no element: a batch without examples."""
        return self._sizes is not None and not self._sizes.numel()

    def call(self, call: LayerCall) -> None:
        """Note the call of a layer; one that is recomputed comes after the layers that follow it."""
        if self._last is not None and call.recomputed and (self.is_over or not self._last.recomputed):
            return
        self._last = call
        if not self._of_model:
            self._sizes = call.sizes

    def end(self, output: Any) -> None:
        """Note the model's output: a tensor, or what holds one."""
        self._of_model = True
        found = output if isinstance(output, Tensor) else _scores(output)
        rows = strided(found) if found is not None else None
        self._sizes = rows.shape if rows is not None else None
        self._is_ragged = found is not None and found.is_nested

    def terms(self, stated: str | None, batch_dim: int) -> Count | None:
        """How many loss terms, and which; None where neither output nor layers tell."""
        last, sizes = self._last, self._sizes
        if last is None or sizes is None:
            return None
        sizes = sizes or last.sizes  # () if the model returned its loss
        if stated == "token":
            return _tokens(sizes, last)
        if stated == "example" and self._is_ragged and self.batch:
            return Count(self.batch, "example")
        if last.spatial:
            return Count(last.examples, "example")
        scores, sequences = sizes[:-1].numel(), len(sizes) > 2
        if len(sizes) < 2:  # of one example, or one score of each
            scores = sizes.numel() if len(last.sizes) > 1 else 1
        # A head that was not seen has another number of features at the same positions.
        is_last = sizes[-1] == last.sizes[-1] or sizes[:-1] == last.sizes[:-1]
        if stated is None and sequences and is_last:
            return Count(scores, "token")
        flat = stated is not None and self.batch and scores % self.batch == 0  # [B * T, features]
        terms = sizes[batch_dim] if sequences else self.batch if flat and self.batch else scores
        return Count(terms, "example", _hidden_tokens(sizes, last) if stated is None else None)


def _tokens(sizes: torch.Size, last: LayerCall) -> Count:
    """The tokens of an output: its elements over the features of the layer that it comes from."""
    features = last.features
    same = sizes.numel() == last.sizes.numel()  # also of another order or shape
    channels = features in (sizes[-1], *sizes[1:2])  # last, or first as `cross_entropy` takes them
    squeezed = features == 1 and len(sizes) == len(last.sizes) - 1  # and resized
    if same or channels or squeezed:
        return Count(sizes.numel() // features, "token")
    if len(sizes) < 2:
        return Count(sizes.numel(), "token")
    guess = f"the output {list(sizes)} is of none of the shapes that {features} features give"
    return Count(last.sizes.numel() // features if last.spatial else sizes[:-1].numel(), "token", guess)


def _hidden_tokens(sizes: torch.Size, last: LayerCall) -> str | None:
    """Why an output that counts as examples may be one of tokens: `[B, F, T]`, or squeezed."""
    if len(last.sizes) < 3 or sizes.numel() != last.sizes.numel():
        return None
    squeezed = last.sizes[-1] == 1 and sizes == last.sizes[:-1]
    if not (squeezed or len(sizes) > 2):
        return None
    return f"the output {list(sizes)} is that of a layer, {list(last.sizes)}, in another shape"


def examples_in(inputs: Iterable[Any], batch_dim: int) -> int | None:
    """Size of the batch dimension of the first tensor, or the length of a list of examples."""
    for value in inputs:
        if isinstance(value, Tensor):
            return value.size(0 if value.is_nested else batch_dim) if value.ndim > batch_dim else None
        if isinstance(value, Mapping):
            return examples_in(value.values(), batch_dim)
        if isinstance(value, list | tuple) and value:
            return len(value) if isinstance(value, list) else examples_in(value, batch_dim)
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


# ------------------------------------------------------------
# Layers without statistics on this rank, whose outputs tell what the loss is made of all the same.
#
# A head may be frozen, skipped or of a kind that K-FAC does not take, and with `dp_kfac` most layers are
# other ranks'. Normalisation layers and other modules without a matrix are no heads.


_CONVOLUTIONS = nn.modules.conv._ConvNd
_HEADS = (*LAYERS, nn.RNNBase)
"""Kinds whose output is known to have features last, or channels first; subclasses too."""


def other_layers(model: nn.Module, captured: Sequence[KroneckerLayer]) -> list[tuple[nn.Module, bool]]:
    """Modules with a matrix of their own that have no hook of `captured`; with whether one is the last.

    The last in the model's order, where no captured layer follows: only that one is most likely a head.
    """
    known: set[int] = set()
    for layer in captured:
        known.add(id(layer.host if isinstance(layer, ProjectionLayer) else layer.module))
        known.add(id(layer.module))
        known.update(map(id, layer.heads if isinstance(layer, TiedEmbeddingLayer) else ()))
    found = [module for module in model.modules() if id(module) in known or _has_matrix(module)]
    last = found[-1] if found else None
    return [(module, module is last) for module in found if id(module) not in known and module is not model]


def output_of(module: nn.Module, output: Any) -> Tensor | None:
    """The scores or features that a layer returns; None if their last dimension is not known to be such."""
    found = output[0] if isinstance(output, tuple) and output else output
    if not (isinstance(found, Tensor) and found.requires_grad and found.ndim and found.numel()):
        return None
    found = strided(found)
    if found is None:
        return None
    if isinstance(module, _HEADS):
        return found
    matrices = [own for own in module.parameters(recurse=False) if own.ndim == 2]
    return found if any(found.shape[-1] in own.shape for own in matrices) else None


def call_of(module: nn.Module, output: Tensor, *, recomputed: bool) -> LayerCall:
    """The call of a layer by its output."""
    sizes = output.shape
    if isinstance(module, _CONVOLUTIONS):
        examples = sizes[0] if output.ndim == len(module.kernel_size) + 2 else 1
        return LayerCall(True, examples, module.out_channels, sizes, recomputed)
    return LayerCall(False, sizes[0], sizes[-1], sizes, recomputed)


def _has_matrix(module: nn.Module) -> bool:
    if isinstance(module, parametrize.ParametrizationList):  # its output is a weight
        return False
    return isinstance(module, _HEADS) or any(own.ndim >= 2 for own in module.parameters(recurse=False))
