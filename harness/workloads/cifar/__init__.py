"""CIFAR-10 and CIFAR-100, image classification: what a login node knows of them (no torch)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.workloads.description import (
    DATA_MEANINGS,
    EMBEDDED,
    FILES,
    SYNTHETIC,
    Options,
    WorkloadDescription,
    check_share,
    check_width,
    limited,
)

CIFAR_MODELS = ("resnet8", "resnet14", "resnet20", "resnet32", "resnet56", "resnet110", "vgg16")

CIFAR_TRAIN, CIFAR_TEST = 50_000, 10_000
EMBEDDED_TRAIN, EMBEDDED_TEST, EMBEDDED_CLASSES = 2_000, 500, 10  # harness/workloads/embedded/cifar10.tar.xz

_CIFAR_OPTIONS: dict[str, Any] = {
    "model": "resnet32",
    "width": 1.0,
    "data": FILES,
    "download": False,
    "augment": True,
    "label_smoothing": 0.0,
    "train_examples": 0,
    "test_examples": 0,
}

IMAGE_MEANINGS = {
    **DATA_MEANINGS,
    "augment": "whether training images are cropped and flipped at random, as published",
    "label_smoothing": "probability spread over all classes, in [0, 1)",
    "train_examples": "how many training images are used, as many of each class; 0 for all",
    "test_examples": "how many held-out images are used, as many of each class; 0 for all",
}
_CIFAR_MEANINGS = {
    **IMAGE_MEANINGS,
    "model": "the network",
    "width": "its channels as a multiple of the published ones, > 0",
    "download": "whether missing files are downloaded and checked against the published checksum",
}


def cifar_examples(options: Options) -> int:
    """Size of CIFAR's training set, or of the embedded part, limited by `train_examples`."""
    embedded = options["data"] == EMBEDDED
    train, test = (EMBEDDED_TRAIN, EMBEDDED_TEST) if embedded else (CIFAR_TRAIN, CIFAR_TEST)
    check_width(options, 64 if options["model"] == "vgg16" else 16)
    check_share(options, "label_smoothing")
    limited("test_examples", options, test)
    return limited("train_examples", options, train)


def smallest_cifar_batch(options: Options) -> int:
    """Two for VGG, whose last features are one pixel: of a single example torch normalises no batch."""
    return 2 if options["model"] == "vgg16" else 1


def cifar100_examples(options: Options) -> int:
    """As for CIFAR-10; no part of CIFAR-100 is embedded."""
    if options["data"] == EMBEDDED:
        raise ValueError("data='embedded' is a part of CIFAR-10; use files, synthetic or a folder")
    return cifar_examples(options)


CIFAR10 = WorkloadDescription(
    module="harness.workloads.cifar.cifar",
    builder="build_cifar10",
    metrics={"accuracy": "higher", "loss": "lower"},
    options=_CIFAR_OPTIONS,
    meanings=_CIFAR_MEANINGS,
    choices={"model": CIFAR_MODELS},
    train_examples=CIFAR_TRAIN,
    counted=cifar_examples,
    ignored={("data", EMBEDDED): ("download",), ("data", SYNTHETIC): ("download",)},
    least_local_batch=smallest_cifar_batch,
    no_batch_norm=lambda _: "",
    about="60,000 photographs of 32x32 pixels, 10 classes (Krizhevsky 2009); ResNet-8 to 110, VGG-16",
)
CIFAR100 = replace(
    CIFAR10,
    builder="build_cifar100",
    counted=cifar100_examples,
    about="60,000 photographs of 32x32 pixels, 100 classes (Krizhevsky 2009); the same networks",
)
