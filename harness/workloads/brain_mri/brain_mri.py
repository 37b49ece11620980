"""Segmentation of brain MRI (Buda et al. 2019), KAISA's U-Net: abnormal tissue, scored by Dice per patient.

As in the reference that KAISA trains (github.com/mateuszbuda/brain-segmentation-pytorch): the soft Dice loss
of a batch, random scales (5 %), turns (15 degrees) and mirrors, ten patients held out. Not as there: slices
are not cropped to the head, pixels are normalised by a patient's mean and deviation, and each slice comes
once an epoch, where the reference draws slices with much abnormal tissue more often.

The published files (LGG, https://www.kaggle.com/datasets/mateuszbuda/lgg-mri-segmentation) are one folder for
each of 110 patients with `<patient>_<number>.tif` and `<patient>_<number>_mask.tif`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from harness.errors import DataError
from harness.workloads.brain_mri import SOURCE, UNET_FEATURES, UNET_LEVELS
from harness.workloads.coco.scenes import Pictures, digit_scenes
from harness.workloads.description import EMBEDDED, SYNTHETIC
from harness.workloads.models.vision import UNet
from harness.workloads.sources.files import check_enough, read_image
from harness.workloads.sources.folders import data_folder, how_to_point
from harness.workloads.workload import EpochSampler, Share

SCALE, DEGREES = 0.05, 15.0  # of the augmentation, as published
SMOOTH = 1.0  # added to both counts of the soft Dice loss, as published

Batch = tuple[Tensor, Tensor]


class Slices(NamedTuple):
    """Slices on the device.

    Attributes:
        pixels: uint8 `[N, 3, side, side]`.
        masks: bool `[N, side, side]`.
        mean: `[N, 3, 1, 1]`, of each channel over the slices of a patient.
        deviation: the same.
    """

    pixels: Tensor
    masks: Tensor
    mean: Tensor
    deviation: Tensor

    def images(self) -> Tensor:
        """The pixels, of mean 0 and deviation 1 over a patient."""
        images = (self.pixels.float() - self.mean) / self.deviation
        # Channels last makes a CPU's convolutions faster, and a GPU's in float32 not.
        return images.contiguous(memory_format=torch.channels_last) if images.is_cpu else images


class BrainMRI:
    """Slices as one rank sees them."""

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        self._options, self._share = options, share
        train, test = _patients(options)
        slices = [_slices(patient, share.device) for patient in train]
        available = sum(len(part.masks) for part in slices)
        count = options["train_examples"] or available
        check_enough("training patients", "slices", available, "train_examples", count)
        self._train = Slices(*(torch.cat(column)[:count] for column in zip(*slices, strict=True)))
        self._test = test[share.rank :: share.world_size]
        self.steps_per_epoch = share.steps_per_epoch(count)
        if not self.steps_per_epoch:
            raise DataError(
                f"there are {count} training slices, fewer than one global batch of {share.global_batch_size}"
            )

    def model(self) -> nn.Module:
        """The U-Net, `width` times as wide as published."""
        return UNet(round(UNET_FEATURES * self._options["width"]), levels=UNET_LEVELS).to(self._share.device)

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Shuffled and augmented anew each epoch; the incomplete last batch is dropped."""
        for indices in EpochSampler(self._share, len(self._train.masks), epoch, first_step):
            chosen = Slices(*(column[indices] for column in self._train))
            images, masks = chosen.images(), chosen.masks
            if self._options["augment"] and self._options["data"] != SYNTHETIC:
                seeds = [f"{self._share.seed} {epoch} {index}" for index in indices.tolist()]
                images, masks = moved(images, masks, [Random(seed) for seed in seeds])  # noqa: S311  no secret
            yield images, masks

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """1 minus the soft Dice coefficient of all pixels of the batch."""
        images, masks = batch
        return 1.0 - soft_dice(model(images), masks)

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        """Dice, intersection over union and loss, each over all slices of a patient; sums over patients."""
        sums = {"dice": 0.0, "iou": 0.0, "loss": 0.0}
        for patient in self._test:
            slices = _slices(patient, self._share.device)
            wanted, images = slices.masks, slices.images()
            scores = torch.cat([model(part).float() for part in images.split(self._share.local_batch_size)])
            found = scores[:, 0] > 0
            both, either = float((found & wanted).sum()), float((found | wanted).sum())
            sums["iou"] += both / either if either else 1.0
            sums["dice"] += 2 * both / (both + either) if either else 1.0
            sums["loss"] += 1.0 - float(soft_dice(scores, wanted))
        return sums, len(self._test)


def build(options: Mapping[str, Any], share: Share) -> BrainMRI:
    """The workload as the rank of `share` sees it."""
    return BrainMRI(options, share)


def soft_dice(scores: Tensor, masks: Tensor) -> Tensor:
    """(2 sum p y + s) / (sum p + sum y + s), p of log odds `[B, 1, H, W]`, y of masks `[B, H, W]`."""
    p, y = scores[:, 0].float().sigmoid(), masks.float()
    return (2.0 * (p * y).sum() + SMOOTH) / (p.sum() + y.sum() + SMOOTH)


def moved(images: Tensor, masks: Tensor, randoms: Sequence[Random]) -> Batch:
    """Each image and its mask, scaled, turned and mirrored by its own random numbers."""
    transforms = torch.tensor([_transform(random) for random in randoms], device=images.device)
    grid = functional.affine_grid(transforms, list(images.shape), align_corners=False)
    moved_images = functional.grid_sample(images, grid, mode="bilinear", align_corners=False)
    floats = masks.float().unsqueeze(1)
    moved_masks = functional.grid_sample(floats, grid, mode="nearest", align_corners=False)
    return moved_images, moved_masks[:, 0] > 0.5


def _transform(random: Random) -> list[list[float]]:
    scale = random.uniform(1 - SCALE, 1 + SCALE)
    angle = math.radians(random.uniform(-DEGREES, DEGREES))
    mirror = random.choice((-1.0, 1.0))
    cosine, sine = math.cos(angle) / scale, math.sin(angle) / scale
    return [[mirror * cosine, -sine, 0.0], [mirror * sine, cosine, 0.0]]


def _patients(options: Mapping[str, Any]) -> tuple[list[Patient], list[Patient]]:
    data, side = options["data"], options["image_size"]
    if data == EMBEDDED:
        return scenes()
    if data == SYNTHETIC:
        return random_pixels(options["train_examples"], side)
    return split_patients(data_folder(data), options["test_patients"], side, how_to_point(data))


def _slices(patient: Patient, device: torch.device) -> Slices:
    count = len(patient.masks)
    channels = patient.pixels.reshape(-1, 3)
    mean, deviation = (
        torch.tensor(each, dtype=torch.float32, device=device).expand(count, 3)[..., None, None]
        for each in (channels.mean(0, np.float64), np.maximum(channels.std(0, np.float64), 1e-3))
    )
    pixels = torch.from_numpy(np.ascontiguousarray(patient.pixels.transpose(0, 3, 1, 2))).to(device)
    return Slices(pixels, torch.from_numpy(patient.masks).to(device), mean, deviation)


SPLIT_SEED = 42  # as published; the patients drawn from other folders differ

Array = np.ndarray[Any, Any]


class Patient(NamedTuple):
    """The slices of one patient.

    Attributes:
        name: of the folder.
        pixels: uint8 `[N, side, side, 3]`.
        masks: bool `[N, side, side]`.
    """

    name: str
    pixels: Array
    masks: Array


Split = tuple[list[Patient], list[Patient]]
"""Training and held-out patients."""


def split_patients(root: Path, held_out: int, side: int, how_to_point: str) -> Split:
    """Training and held-out patients of a folder, `held_out` of them by a fixed seed.

    The first and the last slice of a patient are left out, as published.

    Raises:
        DataError: the folder is missing or has too few patients, or a file is missing or damaged.
    """
    if not root.is_dir():
        raise DataError(f"{root} does not exist; get the files from {SOURCE}, {how_to_point}")
    if (root / "kaggle_3m").is_dir():
        root = root / "kaggle_3m"
    folders = sorted(Path(entry.path) for entry in os.scandir(root) if entry.is_dir())
    if len(folders) <= held_out:
        raise DataError(
            f"{root} must have more folders of patients than the {held_out} that "
            f"workload.options.test_patients holds out, got {len(folders)}; get the files from {SOURCE}, "
            f"{how_to_point}"
        )
    chosen = set(Random(SPLIT_SEED).sample(range(len(folders)), held_out))  # noqa: S311  not a secret
    patients = [_read_patient(folder, side) for folder in folders]
    return (
        [patient for number, patient in enumerate(patients) if number not in chosen],
        [patient for number, patient in enumerate(patients) if number in chosen],
    )


def scenes() -> Split:
    """Scenes of real digits, and where their ink is: one patient to train on, one for each test scene."""
    train, test = (_pixels_and_masks(pictures) for pictures in digit_scenes())
    return [Patient("scenes", *train)], [
        Patient(f"scene {number}", pixels[None], mask[None])
        for number, (pixels, mask) in enumerate(zip(*test, strict=True))
    ]


def random_pixels(count: int, side: int) -> Split:
    """Nothing to learn, the same work."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    patient = Patient("random", pixels, pixels[..., 0] > 200)
    return [patient], [Patient("random", pixels[:1], patient.masks[:1])]


def _read_patient(folder: Path, side: int) -> Patient:
    masks = sorted(folder.glob("*_mask.tif"), key=_number)
    if len(masks) < 3:
        raise DataError(
            f"{folder} must have <name>_<number>_mask.tif of three slices or more, got {len(masks)}"
        )
    pixels, inside = [], []
    for path in masks[1:-1]:
        image = path.with_name(path.name.replace("_mask.tif", ".tif"))
        pixels.append(_resized(image, side, Image.Resampling.BILINEAR))
        inside.append(_resized(path, side, Image.Resampling.NEAREST)[..., 0] > 127)
    return Patient(folder.name, np.stack(pixels), np.stack(inside))


def _number(path: Path) -> int:
    """Of a slice: 12 of `TCGA_CS_4944_20010208_12_mask.tif`."""
    number = path.name.removesuffix("_mask.tif").rpartition("_")[2]
    if not number.isdecimal():
        raise DataError(f"{path} must end with _<number>_mask.tif")
    return int(number)


def _resized(path: Path, side: int, how: Image.Resampling) -> Array:
    """Bytes `[side, side, 3]`; an image that is not square gets black edges."""
    image = read_image(str(path), SOURCE)
    longest = max(image.size)
    if image.size != (longest, longest):
        square = Image.new("RGB", (longest, longest))
        square.paste(image, ((longest - image.width) // 2, (longest - image.height) // 2))
        image = square
    return np.asarray(image.resize((side, side), how))


def _pixels_and_masks(pictures: Pictures) -> tuple[Array, Array]:
    pixels = np.stack(pictures.pixels)
    masks = np.zeros(pixels.shape[:3], bool)
    for one in pictures.content["annotations"]:
        masks[one["image_id"]] |= _filled(one["segmentation"]["counts"], masks.shape[1:])
    return pixels, masks


def _filled(counts: Iterable[int], shape: tuple[int, ...]) -> Array:
    """The mask of COCO's run lengths, which go column by column and begin with the zeros."""
    values = [bool(number % 2) for number, _ in enumerate(counts)]
    return np.repeat(values, list(counts)).reshape(shape[::-1]).T
