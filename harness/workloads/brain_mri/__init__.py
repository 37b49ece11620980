"""Slices of brain MRI with masks of abnormal tissue: what a login node knows of them (no torch)."""

from __future__ import annotations

from typing import Any

from harness.workloads.coco import SCENE_TRAIN
from harness.workloads.description import (
    EMBEDDED,
    FILES,
    SYNTHETIC,
    Options,
    WorkloadDescription,
    check_minimum,
    check_width,
    limited,
)

SOURCE = "https://www.kaggle.com/datasets/mateuszbuda/lgg-mri-segmentation"
UNET_FEATURES = 32  # channels of the first level (Buda et al. 2019)
UNET_LEVELS = 4  # halvings of the image's sides

_OPTIONS: dict[str, Any] = {
    "model": "unet",
    "width": 1.0,
    "data": FILES,
    "image_size": 256,
    "augment": True,
    "train_examples": 0,
    "test_patients": 10,
}
_MEANINGS = {
    "data": "`files`, a folder with one folder for each patient; `embedded`, scenes of handwritten digits, "
    "whose ink is to be found, each its own patient; `synthetic`, random pixels",
    "model": "the U-Net of Buda et al. 2019, with batch normalisation and transposed convolutions",
    "width": "channels as a multiple of the published ones, 32 on the first level",
    "image_size": "side in pixels to which files are resized; a multiple of 16; embedded ones have 96",
    "augment": "whether training images are scaled, turned and mirrored at random, as published",
    "train_examples": "training slices that are used, in the order of patients; 0 for all",
    "test_patients": "patients that are held out, chosen by a fixed seed; ten are published",
}
_MINIMUM = {"image_size": 16, "train_examples": 0, "test_patients": 1}


def brain_examples(options: Options) -> int:
    """Training slices, known beforehand for scenes and wherever `train_examples` says it."""
    check_minimum(options, _MINIMUM)
    check_width(options, UNET_FEATURES)
    side = options["image_size"]
    if side % 2**UNET_LEVELS:
        raise ValueError(f"image_size={side} is not allowed; use a multiple of {2**UNET_LEVELS}")
    if options["data"] == EMBEDDED:
        if side != 96:
            raise ValueError(f"image_size={side} is not allowed with data='embedded'; the scenes have 96")
        return limited("train_examples", options, SCENE_TRAIN)
    if options["data"] == SYNTHETIC and not options["train_examples"]:
        raise ValueError("train_examples=0 is not allowed with data='synthetic'; say how many an epoch has")
    return int(options["train_examples"])


BRAIN_MRI = WorkloadDescription(
    module="harness.workloads.brain_mri.brain_mri",
    metrics={"dice": "higher", "iou": "higher", "loss": "lower"},
    options=_OPTIONS,
    meanings=_MEANINGS,
    choices={"model": ("unet",)},
    train_examples=0,
    counted=brain_examples,
    no_batch_norm=lambda _: "",
    ignored={("data", EMBEDDED): ("test_patients",), ("data", SYNTHETIC): ("test_patients", "augment")},
    about="abnormal tissue in slices of brain MRI (LGG, Buda et al. 2019); U-Net",
)
