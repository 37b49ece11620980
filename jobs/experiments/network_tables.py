"""Writes the layers of the papers' networks for `kronscale predict --model`, from the models themselves.

    python -m jobs.experiments.network_tables analysis/prediction/networks.json

Models are built on torch's meta device: no weights, no data. DenseNet-201 needs torchvision, BERT and GPT-2
transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from harness.workloads.models import CifarVGG16, cifar_resnet, imagenet_network
from harness.workloads.models.language import bert, gpt2
from kfac_core import KFACConfig
from kfac_core.layers import find_layers


@dataclass(frozen=True)
class Example:
    """A network and the size of one input.

    Attributes:
        build: the network.
        size: of an image, or the number of tokens.
        skip: parts that K-FAC leaves to the optimizer, as in the sweeps.
    """

    build: Callable[[], nn.Module]
    size: tuple[int, ...]
    skip: tuple[str, ...] = ()


def _text(layers: int, hidden: int, heads: int, vocabulary: int, tokens: int) -> Mapping[str, Any]:
    return {"layers": layers, "hidden": hidden, "heads": heads, "vocabulary": vocabulary,
            "sequence_length": tokens, "dropout": 0.1, "tied": True}  # fmt: skip


_BERT = ("bert.embeddings", "cls")
NETWORKS = {
    **{f"resnet{n}": Example(partial(cifar_resnet, n, 10), (3, 32, 32)) for n in (20, 32, 56, 110)},
    "vgg16": Example(partial(CifarVGG16, 10), (3, 32, 32)),
    **{
        name: Example(partial(imagenet_network, name, 1000), (3, 224, 224))
        for name in ("resnet50", "resnet101", "resnet152", "densenet201")
    },
    "bert_base": Example(partial(bert, _text(12, 768, 12, 30522, 512)), (512,), _BERT),
    "bert_large": Example(partial(bert, _text(24, 1024, 16, 30522, 512)), (512,), _BERT),
    "gpt2": Example(
        partial(gpt2, _text(12, 768, 12, 50257, 1024)), (1024,),
        ("transformer.wte", "transformer.wpe", "lm_head"),
    ),
}  # fmt: skip


def table(example: Example) -> dict[str, Any]:
    """Layers, as name, dimensions of A and G, and rows of an example; and the network's sizes."""
    rows: dict[str, int] = {}
    with torch.device("meta"):
        network = example.build()
        layers = find_layers(network, KFACConfig(skip=example.skip))
        for layer in layers:
            note = partial(_note_rows, rows, layer.name, layer.shape.g.dim)
            layer.module.register_forward_hook(note)
        kind = torch.float32 if len(example.size) == 3 else torch.int64
        with FlopCounterMode(display=False) as flops:
            network(torch.zeros(1, *example.size, dtype=kind))
    own = sum(layer.shape.gradient_elements for layer in layers)
    parameters = sum(parameter.numel() for parameter in network.parameters())
    return {
        "layers": [[x.name, x.shape.a.dim, x.shape.g.dim, rows[x.name]] for x in layers],
        "other_parameters": parameters - own,
        "forward_flops": flops.get_total_flops(),
        "activations": sum(rows[x.name] * x.shape.g.dim for x in layers),
    }


def _note_rows(rows: dict[str, int], name: str, features: int, _: nn.Module, __: Any, out: Tensor) -> None:
    rows[name] = out[0].numel() // features


def main(path: Path) -> None:
    """Write a line a network."""
    lines = [f"{json.dumps(name)}: {json.dumps(table(example))}" for name, example in NETWORKS.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
