"""COCO, boxes and masks of objects: what a login node knows of the workload (no torch)."""

from __future__ import annotations

from typing import Any

from harness.workloads.description import (
    DATA_MEANINGS,
    EMBEDDED,
    FILES,
    SYNTHETIC,
    Options,
    WorkloadDescription,
    check_minimum,
    limited,
)

DETECTION_MODELS = ("maskrcnn_resnet50_fpn", "maskrcnn_resnet18_fpn")

# Training images: 118,287 and 82,783 without those that have no annotation.
COCO_TRAIN = {2017: 117_266, 2014: 82_081}
COCO_CLASSES = 80
SCENE_TRAIN, SCENE_TEST, SCENE_CLASSES = 400, 100, 10

_OPTIONS: dict[str, Any] = {
    "model": "maskrcnn_resnet50_fpn",
    "backbone": "",
    "trainable_layers": 3,
    "width": 1.0,
    "min_size": 800,
    "max_size": 1333,
    "anchor_size": 32,
    "proposals": 2000,
    "sampled_boxes": 512,
    "data": FILES,
    "year": 2017,
    "classes": COCO_CLASSES,
    "augment": True,
    "train_examples": 0,
    "test_examples": 0,
    "workers": 4,
}
_MEANINGS = {
    **DATA_MEANINGS,
    "model": "Mask R-CNN with a feature pyramid on this ResNet",
    "backbone": "file with a state_dict of torchvision's ResNet; empty for random weights",
    "trainable_layers": "stages of the backbone that are trained, 0 to 5; without a backbone file all are",
    "width": "channels of the heads as a multiple of the published ones, > 0",
    "min_size": "shorter side of the resized image in pixels, at least 32",
    "max_size": "longest side of the resized image in pixels, at least `min_size`",
    "anchor_size": "side of the smallest anchor in pixels; each level of the pyramid doubles it",
    "proposals": "regions kept per image while training, at least 2",
    "sampled_boxes": "regions per image that the heads are trained on, at least 2",
    "year": "the data set of 2017 or 2014",
    "classes": "number of classes without background; with another data set together with `train_examples`",
    "augment": "whether training images are flipped at random",
    "workers": "processes of each rank that load images; give the site as many `cpus_per_rank` more",
}
_MINIMUM = {
    "min_size": 32, "anchor_size": 1, "proposals": 2, "sampled_boxes": 2, "classes": 1, "train_examples": 0,
    "test_examples": 0, "workers": 0, "trainable_layers": 0, "max_size": 32,
}  # fmt: skip


def coco_examples(options: Options) -> int:
    """Size of COCO's training set, or `train_examples` of it or of another set in COCO's format."""
    check_minimum(options, _MINIMUM)
    if not 0 < options["width"] <= 64:  # a representation of 1,024 times 64 is beyond every machine
        raise ValueError(f"width={options['width']} is not allowed; use a value > 0 and <= 64")
    if options["trainable_layers"] > 5:
        raise ValueError(f"trainable_layers={options['trainable_layers']} is not allowed; use 0 to 5")
    if options["max_size"] < options["min_size"]:
        raise ValueError(f"max_size={options['max_size']} must be at least min_size={options['min_size']}")
    if options["year"] not in COCO_TRAIN:
        raise ValueError(f"year={options['year']} is not allowed; use 2014 or 2017")
    classes = options["classes"]
    if options["data"] == EMBEDDED:
        if classes != SCENE_CLASSES:
            raise ValueError(
                f"classes={classes} is not allowed with data='embedded', scenes of digits; "
                f"use {SCENE_CLASSES}"
            )
        return limited("train_examples", options, SCENE_TRAIN)
    most = COCO_TRAIN[options["year"]]
    if classes != COCO_CLASSES and not options["train_examples"]:
        raise ValueError(f"train_examples=0 means COCO's {most:,}; with classes={classes} give their number")
    return limited("train_examples", options, most)


def frozen_batch_norm(options: Options) -> str:
    """That of a backbone from a file, as in torchvision; a random backbone trains it."""
    return (
        f"batch normalisation is frozen with backbone={options['backbone']!r}" if options["backbone"] else ""
    )


COCO = WorkloadDescription(
    module="harness.workloads.coco.coco",
    metrics={"box_map": "higher", "mask_map": "higher", "box_ap50": "higher", "mask_ap50": "higher"},
    options=_OPTIONS,
    meanings=_MEANINGS,
    choices={"model": DETECTION_MODELS},
    train_examples=COCO_TRAIN[2017],
    counted=coco_examples,
    no_batch_norm=frozen_batch_norm,
    ignored={
        ("data", EMBEDDED): ("year",),
        ("data", SYNTHETIC): ("augment",),
        ("backbone", ""): ("trainable_layers",),
    },
    about="objects in photographs, their boxes and masks, 80 classes (COCO, Lin et al. 2014); Mask R-CNN",
)
