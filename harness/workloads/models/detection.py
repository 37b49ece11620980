"""Mask R-CNN (He et al. 2017) on a ResNet with a feature pyramid, from torchvision's parts and options."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.errors import DataError
from harness.workloads.sources.loading import import_torchvision

LEVELS = 5  # of the pyramid: strides 4 to 64
CHANNELS, REPRESENTATION, REGION = 256, 1024, 7  # of the published heads; a box's features are REGION squared


def mask_rcnn(options: Mapping[str, Any], weights: Path | None) -> nn.Module:
    """The network of the card's options, every weight random but the backbone's where a file has them.

    As in torchvision, a backbone with given weights keeps its batch normalisation frozen and all but its last
    `trainable_layers` of five parts; one without is trained whole, its batch normalisation too. `width`
    scales pyramid and heads, not the ResNet.

    Args:
        options: of the card.
        weights: a state_dict of torchvision's ResNet of that depth.

    Raises:
        DataError: the file is missing, or holds other weights.
        ModuleNotFoundError: torchvision is missing, or made for another torch.
    """
    vision = import_torchvision("workload coco", "detection")
    faster, masked = vision.models.detection.faster_rcnn, vision.models.detection.mask_rcnn
    backbone = _backbone(vision, options, weights)
    channels, classes = backbone.out_channels, options["classes"] + 1
    hidden = max(1, round(REPRESENTATION * options["width"]))
    sizes = tuple((options["anchor_size"] * 2**level,) for level in range(LEVELS))
    model: nn.Module = masked.MaskRCNN(
        backbone,
        min_size=options["min_size"],
        max_size=options["max_size"],
        rpn_anchor_generator=vision.models.detection.anchor_utils.AnchorGenerator(
            sizes, ((0.5, 1.0, 2.0),) * LEVELS
        ),
        rpn_pre_nms_top_n_train=options["proposals"],
        rpn_post_nms_top_n_train=options["proposals"],
        rpn_pre_nms_top_n_test=options["proposals"] // 2,
        rpn_post_nms_top_n_test=options["proposals"] // 2,
        box_batch_size_per_image=options["sampled_boxes"],
        box_head=faster.TwoMLPHead(channels * REGION**2, hidden),
        box_predictor=faster.FastRCNNPredictor(hidden, classes),
        mask_head=masked.MaskRCNNHeads(channels, (channels,) * 4, 1),
        mask_predictor=masked.MaskRCNNPredictor(channels, channels, classes),
    )
    return model


def _backbone(vision: Any, options: Mapping[str, Any], weights: Path | None) -> Any:
    name = options["model"].split("_")[1]
    norm = vision.ops.FrozenBatchNorm2d if weights is not None else nn.BatchNorm2d
    resnet = getattr(vision.models, name)(weights=None, norm_layer=norm)
    if weights is not None:
        _load(resnet, weights, name)
        trained = ("layer4", "layer3", "layer2", "layer1", "conv1")[: options["trainable_layers"]]
        for parameter_name, parameter in resnet.named_parameters():
            parameter.requires_grad_(parameter_name.startswith(trained))
    width = resnet.inplanes // 8  # of layer1; each further layer doubles it
    return vision.models.detection.backbone_utils.BackboneWithFPN(
        resnet,
        return_layers={f"layer{layer}": str(layer - 1) for layer in range(1, LEVELS)},
        in_channels_list=[width * 2**layer for layer in range(LEVELS - 1)],
        out_channels=max(1, round(CHANNELS * options["width"])),
    )


def _load(resnet: nn.Module, path: Path, name: str) -> None:
    where = f"name a state_dict of torchvision's {name} in workload.options.backbone, or leave it out"
    if not path.is_file():
        raise DataError(f"{path} is not there; {where}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        wanted = resnet.state_dict()
        fitting = {key: state[key] for key in wanted if not key.startswith("fc.")}
        resnet.load_state_dict(fitting, strict=False)  # what it classifies with takes no part
    # what torch.load raises for damaged files is not one kind
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise DataError(f"{path}: no weights of {name} ({type(error).__name__}: {said}); {where}") from None
