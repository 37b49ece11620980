"""COCO (Lin et al. 2014): boxes and masks of objects in photographs, by Mask R-CNN.

Images are shown as in torchvision's reference training: mirrored with probability 1/2, scaled by the network.
What a rank is shown is a function of seed, epoch and example, whatever the world and the number of workers.
The proposals that the network samples for its losses are drawn on each rank from torch's own generator, which
checkpoints contain: the same seed in the same world gives the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from harness.errors import DataError
from harness.workloads import WORKLOADS
from harness.workloads.coco.annotations import (
    METRICS,
    SOURCE,
    Annotations,
    Detection,
    average_precision,
    detections,
    matched,
    read_annotations,
    same_categories,
)
from harness.workloads.coco.scenes import Pictures, digit_scenes, noise
from harness.workloads.description import EMBEDDED, FILES, SYNTHETIC
from harness.workloads.models.detection import mask_rcnn
from harness.workloads.sources.files import check_enough, read_image
from harness.workloads.sources.folders import data_folder, how_to_point, staged
from harness.workloads.workload import EpochSampler, Share, load_batches

OBJECTS = 7  # in a synthetic image; COCO has 7.3 on average
SYNTHETIC_TEST = 4  # images
MASK_THRESHOLD = 0.5  # of a pixel's probability, as in torchvision's reference

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Example = tuple[Tensor, dict[str, Tensor]]
Batch = tuple[list[Tensor], list[dict[str, Tensor]]]


class Images(NamedTuple):
    """Annotated images.

    Attributes:
        pixels: uint8 `[H, W, 3]` of the image with a given id; raises DataError.
    """

    annotations: Annotations
    pixels: Callable[[int], Pixels]


class Coco:
    """Annotated images as one rank sees them.

    Attributes:
        pooled_metrics: those that rank 0 computes from what all ranks have found.
    """

    pooled_metrics = METRICS

    def __init__(self, options: Mapping[str, Any], share: Share, train: Images, test: Images) -> None:
        self._options, self._share = options, share
        self._train, self._test = train, test
        same_categories(train.annotations, test.annotations)
        self._train_ids = _training_ids(train.annotations, WORKLOADS["coco"].examples(options))
        self._test_ids = test.annotations.ids[: options["test_examples"] or None]
        if not self._test_ids:
            raise DataError(f"{test.annotations.name} must have an image, got none")
        self._detections: list[Detection] = []
        self._truth: Any = None  # of this rank's test images, once they are scored
        self.steps_per_epoch = share.steps_per_epoch(len(self._train_ids))

    def model(self) -> nn.Module:
        """Mask R-CNN, its backbone's weights from the file that `backbone` names."""
        file, data = self._options["backbone"], self._options["data"]
        folder = data_folder(FILES if data in (EMBEDDED, SYNTHETIC) else data)
        weights = folder / file if file else None
        model = mask_rcnn(self._options, weights).to(self._share.device)
        self._share.seed_torch()  # ranks have the same weights, and sample different proposals
        return model

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Shuffled and mirrored anew each epoch; the incomplete last batch is dropped."""
        batches = EpochSampler(self._share, len(self._train_ids), epoch, first_step)
        seed = f"{self._share.seed} {epoch}" if self._options["augment"] else None
        yield from self._load(partial(_read_example, self._train, self._train_ids, seed), batches)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The sum of five losses: objectness and boxes of proposals; classes, boxes and masks of objects."""
        losses: dict[str, Tensor] = model(*batch)
        return torch.stack(list(losses.values())).sum()

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        """Detects objects in every world_size-th test image; `findings` scores them.

        One image at a time, as in torchvision's reference: small images would be padded in a batch, which
        changes the detections, and batches differ between worlds.
        """
        self._detections = []
        own = self._share.held_out(len(self._test_ids))
        loaded = self._load(partial(_read_pixels, self._test, self._test_ids), own.split(1))
        for index, (images, _) in zip(own.tolist(), loaded, strict=True):
            (result,) = model(images)
            boxes, labels, scores, masks = (
                result[key].cpu().numpy() for key in ("boxes", "labels", "scores", "masks")
            )
            categories = self._test.annotations.categories
            self._detections += detections(
                self._test_ids[index], boxes, labels, scores, masks[:, 0] > MASK_THRESHOLD, categories
            )
        return {}, len(own)

    def findings(self) -> bytes:
        """Which detections match an object of this rank's test images."""
        if self._truth is None:
            own = self._share.held_out(len(self._test_ids))
            self._truth = self._test.annotations.part([self._test_ids[index] for index in own])
        return matched(self._truth, self._detections)

    def score(self, findings: Sequence[bytes]) -> Mapping[str, float]:
        """COCO's average precisions over the test images of all ranks."""
        return average_precision(self._test_ids, self._test.annotations.categories, findings)

    def _load(self, read: Callable[[int], Example], batches: Iterable[Tensor]) -> Iterator[Batch]:
        workers, device = self._options["workers"], self._share.device
        for images, targets in load_batches(read, batches, workers, _collate, device):
            yield self._on_device(images, targets)

    def _on_device(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Batch:
        device = self._share.device
        return (
            [image.to(device, non_blocking=True).float() / 255 for image in images],
            [
                {key: value.to(device, non_blocking=True) for key, value in target.items()}
                for target in targets
            ],
        )


class SyntheticCoco(Coco):
    """One random batch in every step: the work of training without its data, for throughput."""

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        height = options["min_size"]
        width = min(options["max_size"], height * 4 // 3)
        classes, batch = options["classes"], share.local_batch_size
        pictures = partial(noise, width=width, height=height, classes=classes, objects=OBJECTS)
        train = pictures(count=batch, seed=share.seed * 1_000_003 + share.rank)
        test = pictures(count=SYNTHETIC_TEST, seed=share.seed)
        images = (_in_memory(part, "synthetic images") for part in (train, test))
        super().__init__({**options, "train_examples": batch}, share, *images)
        self.steps_per_epoch = share.steps_per_epoch(WORKLOADS["coco"].examples(options))
        examples = [_read_example(self._train, self._train_ids, None, index) for index in range(batch)]
        self._batch = self._on_device(*_collate(examples))

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The same bytes in every step."""
        for _ in range(first_step, self.steps_per_epoch):
            yield self._batch


def build(options: Mapping[str, Any], share: Share) -> Coco:
    """The workload as the rank of `share` sees it."""
    if options["data"] == SYNTHETIC:
        return SyntheticCoco(options, share)
    classes = options["classes"]
    if options["data"] == EMBEDDED:
        train, test = (_in_memory(part, "scenes of digits") for part in digit_scenes())
        return Coco(options, share, train, test)
    year, hint = options["year"], how_to_point(options["data"])
    splits = tuple(f"{split}{year}" for split in ("train", "val"))
    root = staged(data_folder(options["data"]), ("annotations", *splits))
    train, test = (_from_files(root, split, classes, hint) for split in splits)
    return Coco(options, share, train, test)


def _from_files(root: Path, split: str, classes: int, hint: str) -> Images:
    annotations = read_annotations(root / "annotations" / f"instances_{split}.json", classes, hint)
    folder = root / split
    if not folder.is_dir():
        raise DataError(f"{folder} does not exist; coco reads {split}/*.jpg: get them from {SOURCE}, {hint}")
    return Images(annotations, partial(_read_file, annotations, folder))


def _read_file(annotations: Annotations, folder: Path, number: int) -> Pixels:
    path = folder / annotations.file_name(number)
    image = read_image(str(path), SOURCE)
    if image.size != annotations.size(number):
        expected, got = ("x".join(map(str, size)) for size in (annotations.size(number), image.size))
        raise DataError(
            f"{path} must have {expected} pixels as in {annotations.name}, got {got}; "
            f"get both again from {SOURCE}"
        )
    return np.asarray(image)


def _in_memory(pictures: Pictures, name: str) -> Images:
    return Images(Annotations(pictures.content, name), pictures.pixels.__getitem__)


def _training_ids(annotations: Annotations, wanted: int) -> list[int]:
    ids = annotations.trainable()
    check_enough(annotations.name, "images with objects", len(ids), "train_examples", wanted)
    return ids[:wanted]


def _read_example(images: Images, ids: Sequence[int], seed: str | None, index: int) -> Example:
    """Bytes `[3, H, W]` and objects of image `ids[index]`; with a seed, mirrored with probability 1/2."""
    pixels, objects = images.pixels(ids[index]), images.annotations.objects(ids[index])
    if seed is not None and Random(f"{seed} {index}").random() < 0.5:  # noqa: S311  not a secret
        pixels, objects = pixels[:, ::-1], objects.mirrored()
    target = {key: torch.from_numpy(part) for key, part in objects._asdict().items()}
    return _as_tensor(pixels), target


def _read_pixels(images: Images, ids: Sequence[int], index: int) -> Example:
    """Bytes `[3, H, W]` of image `ids[index]`, without its objects."""
    return _as_tensor(images.pixels(ids[index])), {}


def _as_tensor(pixels: Pixels) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _collate(examples: list[Example]) -> Batch:
    """A batch as torchvision's detectors take it: lists, because images differ in size."""
    images, targets = zip(*examples, strict=True)
    return list(images), list(targets)
