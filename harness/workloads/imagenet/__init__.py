"""ImageNet-1k, or any folder with a folder for each class: what a login node knows of it (no torch)."""

from __future__ import annotations

from typing import Any

from harness.workloads.cifar import EMBEDDED_CLASSES, EMBEDDED_TEST, EMBEDDED_TRAIN, IMAGE_MEANINGS
from harness.workloads.description import (
    EMBEDDED,
    FILES,
    SYNTHETIC,
    Options,
    WorkloadDescription,
    check_minimum,
    check_share,
    limited,
)

IMAGENET_MODELS = ("resnet50", "resnet101", "resnet152", "densenet201", "inception_v3")
SMALLEST_SIDES = {"densenet201": 32, "inception_v3": 75}  # pixels that their strides leave one feature of
IMAGENET_TRAIN, IMAGENET_TEST = 1_281_167, 50_000
_IMAGENET_OPTIONS: dict[str, Any] = {
    "model": "resnet50",
    "data": FILES,
    "augment": True,
    "label_smoothing": 0.1,
    "classes": 1000,
    "image_size": 0,
    "train_examples": 0,
    "test_examples": 0,
    "workers": 4,
    "channels_last": True,
}
_IMAGENET_MEANINGS = {
    **IMAGE_MEANINGS,
    "model": "the network; `densenet201` and `inception_v3` need the extra `vision`",
    "classes": "number of classes, at least 2; with another folder than ImageNet that of its subfolders, "
    "together with `train_examples`",
    "image_size": "height and width in pixels; 0 is the model's own (224, Inception-v3 299)",
    "workers": "processes of each rank that load images; give the site as many `cpus_per_rank` more",
    "channels_last": "whether images and weights are stored channels last, which convolutions on GPUs prefer",
}


def smallest_imagenet_batch(options: Options) -> int:
    """Two where images are so small that the last features are one pixel: torch normalises no single one."""
    one_pixel = 106 if options["model"] == "inception_v3" else 32
    return 2 if 0 < options["image_size"] <= one_pixel else 1


def imagenet_examples(options: Options) -> int:
    """Size of ImageNet's training set, or `train_examples` of it or of another folder of images."""
    check_minimum(options, {"classes": 2, "image_size": 0, "workers": 0})
    check_share(options, "label_smoothing")
    least = SMALLEST_SIDES.get(options["model"], 1)
    if 0 < options["image_size"] < least:
        raise ValueError(
            f"image_size={options['image_size']} is too small for the network; use {least} or more"
        )
    if options["data"] == EMBEDDED:
        if options["classes"] != EMBEDDED_CLASSES:
            raise ValueError(
                f"classes={options['classes']} is not allowed with data='embedded', a part of CIFAR-10 as a "
                f"folder of images; use {EMBEDDED_CLASSES}"
            )
        limited("test_examples", options, EMBEDDED_TEST)
        return limited("train_examples", options, EMBEDDED_TRAIN)
    limited("test_examples", options, IMAGENET_TEST)
    if options["classes"] != 1000 and not options["train_examples"]:
        raise ValueError(
            f"train_examples=0 means ImageNet's 1,281,167; with classes={options['classes']} give "
            f"their number"
        )
    return limited("train_examples", options, IMAGENET_TRAIN)


IMAGENET = WorkloadDescription(
    module="harness.workloads.imagenet.imagenet",
    metrics={"accuracy": "higher", "top5_accuracy": "higher", "loss": "lower"},
    options=_IMAGENET_OPTIONS,
    meanings=_IMAGENET_MEANINGS,
    choices={"model": IMAGENET_MODELS},
    train_examples=IMAGENET_TRAIN,
    counted=imagenet_examples,
    ignored={("data", SYNTHETIC): ("augment", "test_examples", "workers")},
    least_local_batch=smallest_imagenet_batch,
    no_batch_norm=lambda _: "",
    about="1.28 million photographs, 1,000 classes (ILSVRC 2012); ResNet-50 to 152, DenseNet, Inception",
)
