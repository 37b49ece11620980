"""The networks of an acceptance run: model, a fixed batch on the device, and loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.bench.gpu.nets import Encoder
from harness.workloads.models.language import bert
from harness.workloads.models.vision import cifar_resnet, resnet32, resnet50

BERT_BASE = {"layers": 12, "hidden": 768, "heads": 12, "vocabulary": 30522, "sequence_length": 128}
_BERT_SMALL = {"layers": 1, "hidden": 16, "heads": 2, "vocabulary": 64, "sequence_length": 8}
_BERT_SKIPPED = ("bert.embeddings", "embeddings", "cls")  # as the KAISA paper's release


@dataclass(frozen=True)
class Subject:
    """A replica of a network and its batch.

    Attributes:
        about: sizes, and what the network is.
        kfac: fields of `KFACConfig` that this network needs.
    """

    about: str
    model: nn.Module
    loss: Callable[[], Tensor]
    kfac: dict[str, Any]


def subject(name: str, device: torch.device, *, small: bool) -> Subject:
    """One of `resnet32`, `resnet50` and `bert`, always with the same weights and batch."""
    torch.manual_seed(0)
    if name == "bert":
        return _bert(device, small=small)
    examples, side, classes = {"resnet32": (128, 32, 10), "resnet50": (32, 224, 1000)}[name]
    build: Callable[[], nn.Module] = resnet32 if name == "resnet32" else resnet50
    if small:  # the same kinds of layers, seconds of a CPU
        examples, side, build = 2, 16, partial(cifar_resnet, 8, classes, 8)
    with torch.device(device):
        model, images = build(), torch.randn(examples, 3, side, side)
        labels = torch.arange(examples) % classes
    return Subject(
        f"{type(model).__name__}, batch {examples}, {side} pixels",
        model,
        lambda: functional.cross_entropy(model(images).float(), labels),
        {},
    )


def _bert(device: torch.device, *, small: bool) -> Subject:
    options = _BERT_SMALL if small else BERT_BASE
    examples, length, vocabulary = 2 if small else 32, options["sequence_length"], options["vocabulary"]
    own = find_spec("transformers") is None
    with torch.device(device):
        tokens = torch.randint(0, vocabulary, (examples, length))
        labels = tokens.roll(1)
        if own:
            sizes = options["layers"], options["hidden"], options["heads"], vocabulary, length
            model: nn.Module = Encoder(*sizes)
        else:
            model = bert({**options, "dropout": 0.0, "tied": False})

    def loss() -> Tensor:
        scores = model(tokens) if own else model(input_ids=tokens).logits
        return functional.cross_entropy(scores.float().flatten(0, 1), labels.flatten())

    library = "this project's own encoder, as transformers is missing" if own else "transformers"
    about = f"BERT, {options['layers']} layers of {options['hidden']}, from {library}, batch {examples}"
    return Subject(
        f"{about}, {length} tokens, embeddings and head skipped", model, loss, {"skip": _skip(model)}
    )


def _skip(model: nn.Module) -> tuple[str, ...]:
    """Patterns of `_BERT_SKIPPED` that this model has; K-FAC refuses others."""
    names = [name for name, _ in model.named_modules()]
    return tuple(each for each in _BERT_SKIPPED if any(name.startswith(each) for name in names))
