"""Cards of image classification (no torch)."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

from harness.workloads.cards.card import (
    DATA_MEANINGS,
    EMBEDDED,
    FILES,
    SYNTHETIC,
    Options,
    WorkloadCard,
    check_minimum,
    check_share,
    check_width,
    limited,
)

CIFAR_MODELS = ("resnet8", "resnet14", "resnet20", "resnet32", "resnet56", "resnet110", "vgg16")
IMAGENET_MODELS = ("resnet50", "resnet101", "resnet152", "densenet201", "inception_v3")

CIFAR_TRAIN, CIFAR_TEST = 50_000, 10_000
SMALLEST_SIDES = {"densenet201": 32, "inception_v3": 75}  # pixels that their strides leave one feature of
IMAGENET_TRAIN, IMAGENET_TEST = 1_281_167, 50_000
DIGITS_TRAIN = 1437
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

_IMAGE_MEANINGS = {
    **DATA_MEANINGS,
    "augment": "whether training images are cropped and flipped at random, as published",
    "label_smoothing": "probability spread over all classes, in [0, 1)",
    "train_examples": "how many training images are used, as many of each class; 0 for all",
    "test_examples": "how many held-out images are used, as many of each class; 0 for all",
}
_CIFAR_MEANINGS = {
    **_IMAGE_MEANINGS,
    "model": "the network",
    "width": "its channels as a multiple of the published ones, > 0",
    "download": "whether missing files are downloaded and checked against the published checksum",
}
_IMAGENET_MEANINGS = {
    **_IMAGE_MEANINGS,
    "model": "the network; `densenet201` and `inception_v3` need the extra `vision`",
    "classes": "number of classes, at least 2; with another folder than ImageNet that of its subfolders, "
    "together with `train_examples`",
    "image_size": "height and width in pixels; 0 is the model's own (224, Inception-v3 299)",
    "workers": "processes of each rank that load images; give the site as many `cpus_per_rank` more",
    "channels_last": "whether images and weights are stored channels last, which convolutions on GPUs prefer",
}


def cifar_examples(options: Options) -> int:
    """Size of CIFAR's training set, or of the embedded part, limited by `train_examples`."""
    embedded = options["data"] == EMBEDDED
    train, test = (EMBEDDED_TRAIN, EMBEDDED_TEST) if embedded else (CIFAR_TRAIN, CIFAR_TEST)
    check_width(options, 64 if options["model"] == "vgg16" else 16)
    check_share(options, "label_smoothing")
    limited("test_examples", options, test)
    return limited("train_examples", options, train)


def digits_examples(options: Options) -> int:
    """Size of the training set, whatever the width of the network."""
    check_minimum(options, {"width": 1})
    return DIGITS_TRAIN


def smallest_cifar_batch(options: Options) -> int:
    """Two for VGG, whose last features are one pixel: of a single example torch normalises no batch."""
    return 2 if options["model"] == "vgg16" else 1


def smallest_imagenet_batch(options: Options) -> int:
    """Two where images are so small that the last features are one pixel: torch normalises no single one."""
    one_pixel = 106 if options["model"] == "inception_v3" else 32
    return 2 if 0 < options["image_size"] <= one_pixel else 1


def cifar100_examples(options: Options) -> int:
    """As for CIFAR-10; no part of CIFAR-100 is embedded."""
    if options["data"] == EMBEDDED:
        raise ValueError("data='embedded' is a part of CIFAR-10; use files, synthetic or a folder")
    return cifar_examples(options)


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


DIGITS = WorkloadCard(
    module="harness.workloads.digits",
    metrics=MappingProxyType({"accuracy": "higher", "loss": "lower"}),
    options=MappingProxyType({"width": 16}),
    meanings=MappingProxyType({"width": "channels of the first convolution"}),
    train_examples=DIGITS_TRAIN,
    counted=digits_examples,
    about="1,797 real handwritten digits of 8x8 pixels (UCI, inside scikit-learn); a small ConvNet",
)
CIFAR10 = WorkloadCard(
    module="harness.workloads.cifar.cifar",
    builder="build_cifar10",
    metrics=MappingProxyType({"accuracy": "higher", "loss": "lower"}),
    options=MappingProxyType(_CIFAR_OPTIONS),
    meanings=MappingProxyType(_CIFAR_MEANINGS),
    choices=MappingProxyType({"model": CIFAR_MODELS}),
    train_examples=CIFAR_TRAIN,
    counted=cifar_examples,
    ignored=MappingProxyType({("data", EMBEDDED): ("download",), ("data", SYNTHETIC): ("download",)}),
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
IMAGENET = WorkloadCard(
    module="harness.workloads.imagenet.imagenet",
    metrics=MappingProxyType({"accuracy": "higher", "top5_accuracy": "higher", "loss": "lower"}),
    options=MappingProxyType(_IMAGENET_OPTIONS),
    meanings=MappingProxyType(_IMAGENET_MEANINGS),
    choices=MappingProxyType({"model": IMAGENET_MODELS}),
    train_examples=IMAGENET_TRAIN,
    counted=imagenet_examples,
    ignored=MappingProxyType({("data", SYNTHETIC): ("augment", "test_examples", "workers")}),
    least_local_batch=smallest_imagenet_batch,
    no_batch_norm=lambda _: "",
    about="1.28 million photographs, 1,000 classes (ILSVRC 2012); ResNet-50 to 152, DenseNet, Inception",
)
