"""What one forward pass shows of its loss terms: the model's output, and the layer that it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


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
        self.is_over = False

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
        self._sizes = found.shape if found is not None else None

    def terms(self, stated: str | None, batch_dim: int) -> Count | None:
        """How many loss terms, and which; None where neither output nor layers tell."""
        last, sizes = self._last, self._sizes
        if last is None or sizes is None:
            return None
        sizes = sizes or last.sizes  # () if the model returned its loss
        if stated == "token":
            return _tokens(sizes, last)
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
            return value.shape[batch_dim] if value.ndim > batch_dim else None
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
