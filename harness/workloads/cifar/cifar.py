"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), stored and augmented on the device.

All images are on the device as bytes; a batch is a gather from them, so that no worker process is needed and
the data phase is short. Augmentation is the papers': pad by four black pixels, crop to 32 x 32, mirror with
probability 1/2 (He et al. 2016, section 4.2), as a function of seed, epoch and example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.workloads.cifar.cifar_files import VARIANTS, Images, Variant, read_cifar
from harness.workloads.models import CifarVGG16, cifar_resnet
from harness.workloads.workload import EpochSampler, Share, classified

PAD = 4
TEST_BATCH = 500  # divides 10,000; its activations need less memory than a training step

# Mean and standard deviation of the training pixels, from 0 to 1, by channel; the commonly used values.
MOMENTS: Mapping[int, tuple[tuple[float, ...], tuple[float, ...]]] = {
    10: ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    100: ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}


class Cifar:
    """CIFAR as one rank sees it."""

    def __init__(self, variant: Variant, options: Mapping[str, Any], share: Share) -> None:
        self._variant, self._options, self._share = variant, options, share
        train, test = read_cifar(variant, options)
        self._pixels, self._labels = _on_device(train, share.device)
        own = slice(share.rank, None, share.world_size)
        self._test = _on_device(Images(test.pixels[own], test.labels[own]), share.device)
        self._crops = _crops(self._pixels) if options["augment"] else None
        mean, deviation = (torch.tensor(values, device=share.device) for values in MOMENTS[variant.classes])
        # (x / 255 - mean) / deviation in one multiplication and one addition
        self._scale = (1 / (255 * deviation)).view(3, 1, 1)
        self._shift = (-mean / deviation).view(3, 1, 1)
        self.steps_per_epoch = share.steps_per_epoch(len(self._labels))

    def model(self) -> nn.Module:
        """The network that `model` names, `width` times as wide as published."""
        name, width, classes = self._options["model"], self._options["width"], self._variant.classes
        if name == "vgg16":
            network: nn.Module = CifarVGG16(classes, round(64 * width))
        else:
            network = cifar_resnet(int(name.removeprefix("resnet")), classes, round(16 * width))
        return network.to(self._share.device)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffled and augmented anew each epoch; the incomplete last batch is dropped."""
        examples, device = len(self._labels), self._share.device
        sampler = EpochSampler(self._share, examples, epoch, first_step, device)
        corners = torch.randint(0, 2 * PAD + 1, (2, examples), generator=sampler.generator).to(device)
        mirrored = torch.randint(0, 2, (examples,), generator=sampler.generator).bool().to(device)
        for indices in sampler:
            if self._crops is None:
                pixels = self._pixels[indices]
            else:
                pixels = self._crops[indices, :, corners[0, indices], corners[1, indices]]
                pixels = torch.where(mirrored[indices].view(-1, 1, 1, 1), pixels.flip(3), pixels)
            yield self._normalised(pixels), self._labels[indices]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross entropy, with `label_smoothing` of the probability spread over all classes."""
        images, labels = batch
        return functional.cross_entropy(
            model(images), labels, label_smoothing=self._options["label_smoothing"]
        )

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        """Correct predictions and summed loss over every world_size-th test image."""
        sums = {"accuracy": 0.0, "loss": 0.0}
        pixels, labels = self._test
        for images, targets in zip(pixels.split(TEST_BATCH), labels.split(TEST_BATCH), strict=True):
            found = classified(model(self._normalised(images)), targets)
            sums = {metric: sums[metric] + found[metric] for metric in sums}
        return sums, len(labels)

    def _normalised(self, pixels: Tensor) -> Tensor:
        images = torch.addcmul(self._shift, pixels.float(), self._scale)
        # Channels last makes a CPU's convolutions faster, and a GPU's in float32 not.
        return images.contiguous(memory_format=torch.channels_last) if images.is_cpu else images


build_cifar10 = partial(Cifar, VARIANTS[10])
build_cifar100 = partial(Cifar, VARIANTS[100])
"""CIFAR-100 with its hundred fine classes."""


def _on_device(images: Images, device: torch.device) -> tuple[Tensor, Tensor]:
    pixels, labels = (torch.from_numpy(column.copy()).to(device) for column in images)
    return pixels, labels


def _crops(pixels: Tensor) -> Tensor:
    """All crops of the padded images as a view `[N, 3, 2 PAD + 1, 2 PAD + 1, 32, 32]`, not a copy."""
    padded = functional.pad(pixels, (PAD, PAD, PAD, PAD))
    return padded.unfold(2, pixels.shape[2], 1).unfold(3, pixels.shape[3], 1)
