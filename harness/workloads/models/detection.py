"""Mask R-CNN (He et al. 2017) on a ResNet with a feature pyramid, from torchvision's modules."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from harness.errors import DataError
from harness.workloads.sources.files import import_extra

LEVELS = 5  # of the pyramid: strides 4 to 64
CHANNELS, REPRESENTATION, REGION = 256, 1024, 7  # of the published heads; a box's features are REGION squared


def mask_rcnn(options: Mapping[str, Any], weights: Path | None) -> nn.Module:
    """The network, its weights random except those of a backbone from a file.

    As in torchvision, a backbone from a file has frozen batch normalisation, and of its five parts only the
    last `trainable_layers` are trained; a random one is trained completely. `width` scales the pyramid and
    the heads, not the ResNet.

    Args:
        options: of the workload `coco`.
        weights: a state_dict of torchvision's ResNet of that depth; None for random weights.

    Raises:
        DataError: the file is missing, or has other weights.
        ModuleNotFoundError: torchvision is missing, or built for another version of torch.
    """
    vision = import_extra("torchvision", "workload coco", "detection", ", built for the installed torch")
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
    advice = f"name a state_dict of torchvision's {name} in workload.options.backbone, or omit the option"
    if not path.is_file():
        raise DataError(f"{path} does not exist; {advice}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        wanted = resnet.state_dict()
        fitting = {key: state[key] for key in wanted if not key.startswith("fc.")}
        resnet.load_state_dict(fitting, strict=False)  # without the classifier
    except Exception as error:  # torch.load raises many kinds for damaged files
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{path} must have the weights of {name} ({type(error).__name__}: {reason}); {advice}"
        ) from None
