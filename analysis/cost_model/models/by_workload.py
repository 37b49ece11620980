"""The table of a workload's network under its options, for predictions of cells that nobody has run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from analysis.cost_model.errors import CostModelError
from analysis.cost_model.models.bert import gpt, masked_bert
from analysis.cost_model.models.layers import Model
from analysis.cost_model.models.mask_rcnn import mask_rcnn
from analysis.cost_model.models.resnet import cifar_resnet, imagenet_resnet
from analysis.cost_model.models.translation import transformer
from analysis.cost_model.models.unet import unet
from analysis.cost_model.models.vgg import vgg16

Options = Mapping[str, Any]

SENTENCE_TOKENS = 40
"""To which a batch of Multi30k's captions is padded: its longest of 128, where the mean is 15."""

_PUBLISHED = 224  # pixels a side of ImageNet's


def model_of(workload: str, options: Options, skip: Iterable[str] | None = None) -> Model:
    """The network that a workload trains.

    Args:
        workload: its name.
        options: of its card, with the defaults.
        skip: K-FAC's `skip`; None for a cell without K-FAC.

    Raises:
        CostModelError: there is no table of this network, or none of what `skip` leaves of it.
    """
    build = _TABLES.get(workload)
    if build is None:
        raise CostModelError(f"workload={workload!r} has no table of layers; tables: {', '.join(_TABLES)}")
    model = build(options)
    if skip is None:
        return model
    patterns, plain = list(skip), _PLAIN.get(workload, ())
    for name in plain:
        if not any(re.match(pattern, name) for pattern in patterns):
            raise CostModelError(
                f"workload={workload!r} has no table with {name} preconditioned; add it to kfac.skip"
            )
    return _without(model, [each for each in patterns if not any(re.match(each, name) for name in plain)])


def _without(model: Model, patterns: list[str]) -> Model:
    """The model with the layers that a pattern matches counted among the others."""
    left = [layer for layer in model.layers if any(re.match(each, layer.name) for each in patterns)]
    unknown = [each for each in patterns if not any(re.match(each, layer.name) for layer in left)]
    if unknown:
        raise CostModelError(f"kfac.skip={unknown[0]!r} matches no layer of the table of {model.name}")
    return replace(
        model,
        layers=tuple(layer for layer in model.layers if layer not in left),
        other_parameters=model.other_parameters + sum(layer.shape.gradient_elements for layer in left),
        plain_flops=model.plain_flops + sum(layer.forward_flops for layer in left),
    )


def _cifar(classes: int) -> Callable[[Options], Model]:
    def build(options: Options) -> Model:
        name, width = options["model"], options["width"]
        if name == "vgg16":
            return replace(vgg16(classes, round(64 * width)), name=_named(name, width))
        model = cifar_resnet(int(name.removeprefix("resnet")), classes, round(16 * width))
        return replace(model, name=_named(name, width))

    return build


def _imagenet(options: Options) -> Model:
    name, size = options["model"], options["image_size"] or _PUBLISHED
    if not name.startswith("resnet"):
        raise CostModelError(f"model={name!r} of imagenet has no table for every size; use a ResNet")
    model = imagenet_resnet(int(name.removeprefix("resnet")), options["classes"], size)
    return model if size == _PUBLISHED else replace(model, name=f"{name}, {size} pixels")


def _coco(options: Options) -> Model:
    if options["model"] != "maskrcnn_resnet50_fpn" or options["width"] != 1 or not options["backbone"]:
        raise CostModelError(
            "coco has a table of maskrcnn_resnet50_fpn of width 1 with a backbone from a file"
        )
    return mask_rcnn(options["classes"], options["min_size"], options["sampled_boxes"])


def _named(name: str, width: float) -> str:
    """A calibration's facts are of the published width alone."""
    return name if width == 1 else f"{name}, width {width:g}"


def _language(build: Callable[[int, int, int, int], Model]) -> Callable[[Options], Model]:
    return lambda options: build(
        options["layers"], options["hidden"], options["sequence_length"], options["vocabulary"]
    )


_TABLES: Mapping[str, Callable[[Options], Model]] = MappingProxyType({
    "cifar10": _cifar(10),
    "cifar100": _cifar(100),
    "imagenet": _imagenet,
    "coco": _coco,
    "brain_mri": lambda options: unet(options["image_size"], round(32 * options["width"])),
    "bert": _language(masked_bert),
    "gpt": _language(gpt),
    "multi30k": lambda options: transformer(
        options["layers"], options["hidden"], options["feed_forward"], options["vocabulary"], SENTENCE_TOKENS
    ),
})  # fmt: skip

_PLAIN: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "coco": ("backbone", "rpn"),
    "bert": ("bert.embeddings", "cls"),
    "gpt": ("transformer.wte", "transformer.wpe", "lm_head"),
    "multi30k": ("source_embedding", "target_embedding", "head"),
})  # fmt: skip
"""Parts that the tables count as not preconditioned, so that `skip` must name them."""
