"""ImageNet-1k (Russakovsky et al. 2015): images in folders, read by worker processes.

Training is SC20's: random resized crops and mirrors, label smoothing; warm-up and milestones belong to the
optimizer. What a rank is shown is a function of seed, epoch and example, whatever the world and the number of
workers.

Crops of an image are those of torchvision's reference training, bit for bit for the same random numbers:
random resized crop and mirror for training, the centre for testing. torchvision's own cannot be used: their
random numbers must be a function of seed, epoch and example, and torchvision works only with the torch that
it was built for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from harness.workloads import WORKLOADS
from harness.workloads.description import EMBEDDED, SYNTHETIC
from harness.workloads.imagenet.image_folders import SOURCE, ImageFiles, list_images, unpack_embedded
from harness.workloads.models import imagenet_network
from harness.workloads.sources.files import check_enough, read_image
from harness.workloads.sources.folders import data_folder, how_to_point, staged
from harness.workloads.workload import EpochSampler, Share, load_batches

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as torchvision's models expect
SIDES = {"inception_v3": 299}  # 224 for the others

Batch = tuple[Tensor, Tensor]


class ImageNet:
    """ImageNet as one rank sees it; a subclass provides the batches."""

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        self._options, self._share = options, share
        self._side = options["image_size"] or SIDES.get(options["model"], 224)
        self._examples = WORKLOADS["imagenet"].examples(options)
        mean, deviation = (
            torch.tensor(values, device=share.device).view(3, 1, 1) for values in (MEAN, DEVIATION)
        )
        self._scale, self._shift = 1 / (255 * deviation), -mean / deviation
        self.steps_per_epoch = share.steps_per_epoch(self._examples)

    def model(self) -> nn.Module:
        """The network that `model` names.

        Under `channels_last` its inputs select the convolutions' kernels. The weights keep their layout,
        which is that of their gradients in the buffer that is averaged.
        """
        return imagenet_network(self._options["model"], self._options["classes"]).to(self._share.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy, with `label_smoothing` of the probability spread over all classes."""
        images, labels = batch
        return functional.cross_entropy(
            model(images), labels, label_smoothing=self._options["label_smoothing"]
        )

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        """Of this share, images whose class scores highest or among the five highest, and the summed loss."""
        sums = torch.zeros(3, dtype=torch.float64, device=self._share.device)
        count = 0
        for images, labels in self._test_batches():
            scores = model(images)
            sums[0] += (scores.argmax(1) == labels).sum()
            highest = scores.topk(min(5, scores.shape[1]), dim=1).indices
            sums[1] += (highest == labels[:, None]).sum()
            sums[2] += functional.cross_entropy(scores, labels, reduction="sum")
            count += len(labels)
        return dict(zip(("accuracy", "top5_accuracy", "loss"), sums.tolist(), strict=True)), count

    def _test_batches(self) -> Iterable[Batch]:
        raise NotImplementedError

    def _normalised(self, pixels: Tensor, labels: Tensor) -> Batch:
        """A batch on the device from bytes `[B, 3, side, side]`."""
        device = self._share.device
        images = torch.addcmul(self._shift, pixels.to(device, non_blocking=True).float(), self._scale)
        last = self._options["channels_last"]
        layout = torch.channels_last if last else torch.contiguous_format
        return images.contiguous(memory_format=layout), labels.to(device, non_blocking=True)


class FolderImageNet(ImageNet):
    """The images of a folder."""

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        super().__init__(options, share)
        if options["data"] == EMBEDDED:
            root, test_split = unpack_embedded(), "test"
        else:
            root, test_split = staged(data_folder(options["data"]), ("train", "val")), "val"
        hint = how_to_point(options["data"])
        train = list_images(root / "train", options["classes"], hint)
        check_enough(root / "train", "images", len(train.paths), "train_examples", self._examples)
        self._train = train.limited(self._examples)
        test = list_images(root / test_split, options["classes"], hint)
        self._test = test.limited(options["test_examples"] or len(test.paths))

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Shuffled and cropped anew each epoch; the incomplete last batch is dropped."""
        batches = EpochSampler(self._share, self._examples, epoch, first_step)
        seed = f"{self._share.seed} {epoch}" if self._options["augment"] else None
        return self._load(self._train, seed, batches)

    def _test_batches(self) -> Iterator[Batch]:
        batches = self._share.held_out(len(self._test.paths)).split(self._share.local_batch_size)
        return self._load(self._test, None, batches)

    def _load(self, files: ImageFiles, seed: str | None, batches: Iterable[Tensor]) -> Iterator[Batch]:
        read, workers = partial(_read_view, files, self._side, seed), self._options["workers"]
        for pixels, labels in load_batches(read, batches, workers, _collate, self._share.device):
            yield self._normalised(pixels, labels)


class SyntheticImageNet(ImageNet):
    """One random batch in every step: the work of training without its data, for throughput."""

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        super().__init__(options, share)
        shape = (share.local_batch_size, self._side, self._side, 3)
        generator = torch.Generator().manual_seed(share.seed * 1_000_003 + share.rank)
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2)
        labels = torch.randint(0, options["classes"], shape[:1], generator=generator)
        self._pixels, self._labels = pixels.to(share.device), labels.to(share.device)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The same bytes in every step."""
        for _ in range(first_step, self.steps_per_epoch):
            yield self._normalised(self._pixels, self._labels)

    def _test_batches(self) -> Iterator[Batch]:
        yield self._normalised(self._pixels, self._labels)


def build(options: Mapping[str, Any], share: Share) -> ImageNet:
    """The workload as the rank of `share` sees it."""
    return (
        SyntheticImageNet(options, share) if options["data"] == SYNTHETIC else FolderImageNet(options, share)
    )


def _read_view(files: ImageFiles, side: int, seed: str | None, index: int) -> tuple[View, int]:
    """Bytes `[side, side, 3]` and the label of an image; without a seed, of its centre."""
    image, label = read_image(files.paths[index], SOURCE), int(files.labels[index])
    if seed is None:
        return centre_view(image, side), label
    return training_view(image, side, Random(f"{seed} {index}")), label  # noqa: S311  not a secret


def _collate(examples: list[tuple[View, int]]) -> Batch:
    """Bytes `[B, 3, side, side]`, channels innermost in memory, and labels."""
    views, labels = zip(*examples, strict=True)
    return torch.from_numpy(np.stack(views)).permute(0, 3, 1, 2), torch.tensor(labels)


AREA = (0.08, 1.0)  # of the image that a crop takes, and
ASPECT = (3 / 4, 4 / 3)  # its width by its height (Szegedy et al. 2015, section 6)
TRIES = 10
CENTRE = 0.875  # of the shorter side that a test image keeps: 224 of 256, 299 of 342

Box = tuple[int, int, int, int]
View = np.ndarray[Any, np.dtype[np.uint8]]


def training_view(image: Image.Image, size: int, random: Random) -> View:
    """A random crop, mirrored with probability 1/2: uint8 `[size, size, 3]`."""
    left, top, width, height = random_box(image.width, image.height, random)
    crop = image.crop((left, top, left + width, top + height)).resize((size, size), Image.Resampling.BILINEAR)
    view = np.asarray(crop)
    return np.ascontiguousarray(view[:, ::-1]) if random.random() < 0.5 else view


def random_box(width: int, height: int, random: Random) -> Box:
    """Left, top, width and height of a crop of 8 to 100 % of the area, with an aspect of 3:4 to 4:3."""
    for _ in range(TRIES):
        area = width * height * random.uniform(*AREA)
        aspect = math.exp(random.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    w = min(width, round(height * ASPECT[1]))  # no crop fits: the centre, with the nearest allowed aspect
    h = min(height, round(width / ASPECT[0]))
    return (width - w) // 2, (height - h) // 2, w, h


def centre_view(image: Image.Image, size: int) -> View:
    """The centre of the image: uint8 `[size, size, 3]`."""
    short = round(size / CENTRE)
    width, height = image.size
    portrait = width <= height
    scaled = (short, int(short * height / width)) if portrait else (int(short * width / height), short)
    image = image.resize(scaled, Image.Resampling.BILINEAR)
    left, top = (round((side - size) / 2) for side in image.size)
    return np.asarray(image.crop((left, top, left + size, top + size)))
