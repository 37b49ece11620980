"""COCO (Lin et al. 2014): boxes and masks of objects in photographs, by Mask R-CNN.

Images are shown as in torchvision's reference training: mirrored in half of the cases, scaled by the network
itself. What a rank is shown is a matter of seed, epoch and example, whatever the world and the number of
workers. Which proposals the network samples for its losses is drawn on each rank from torch's own generator,
which checkpoints keep: the same seed on the same world gives the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from harness.errors import DataError
from harness.workloads import WORKLOADS
from harness.workloads.cards.vision import EMBEDDED, FILES, SYNTHETIC
from harness.workloads.coco.files import SOURCE, Annotations, read_annotations, same_categories
from harness.workloads.coco.scenes import Pictures, digit_scenes, noise
from harness.workloads.coco.scores import METRICS, Detection, average_precision, detections, packed, unpacked
from harness.workloads.models.detection import mask_rcnn
from harness.workloads.sources.folders import data_folder, how_to_point
from harness.workloads.sources.loading import load_batches
from harness.workloads.sources.order import generator_of, local_batches, steps_per_epoch
from harness.workloads.sources.photos import read_photo
from harness.workloads.sources.staging import staged
from harness.workloads.workload import Share

OBJECTS = 7  # in a made-up image; COCO has 7.3
MADE_UP_TEST = 4  # images of which a made-up test set consists
MASK_THRESHOLD = 0.5  # of a pixel's probability, as in torchvision's reference

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Batch = tuple[list[Tensor], list[dict[str, Tensor]]]


class Images(NamedTuple):
    """Annotated images.

    Attributes:
        pixels: uint8 `[H, W, 3]` of the image with an id; raises DataError.
    """

    annotations: Annotations
    pixels: Callable[[int], Pixels]


class Coco:
    """Annotated images as one rank sees them.

    Attributes:
        pooled_metrics: those that rank 0 makes of all ranks' detections.
    """

    pooled_metrics = METRICS

    def __init__(self, options: Mapping[str, Any], share: Share, train: Images, test: Images) -> None:
        self._options, self._share = options, share
        self._train, self._test = train, test
        same_categories(train.annotations, test.annotations)
        self._train_ids = _exactly(train.annotations, WORKLOADS["coco"].examples(options))
        self._test_ids = test.annotations.ids[: options["test_examples"] or None]
        if not self._test_ids:
            raise DataError(f"{test.annotations.name}: no image in it")
        self._found: list[Detection] = []
        self.steps_per_epoch = steps_per_epoch(share, len(self._train_ids))

    def model(self) -> nn.Module:
        """Mask R-CNN, its backbone's weights from the file that `backbone` names."""
        named = self._options["backbone"]
        weights = _folder(self._options["data"]) / named if named else None
        model = mask_rcnn(self._options, weights).to(self._share.device)
        # Weights are drawn alike on all ranks; which proposals are sampled from here on is each one's own.
        torch.manual_seed(self._share.seed * 1_000_003 + self._share.rank)
        return model

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Shuffled and mirrored anew each epoch; the incomplete last batch is left out."""
        order = torch.randperm(len(self._train_ids), generator=generator_of(self._share, epoch))
        mine = [indices.tolist() for indices in local_batches(self._share, order, first_step)]
        draws = f"{self._share.seed} {epoch}" if self._options["augment"] else None
        yield from self._loaded(Views(self._train, self._train_ids, draws), mine)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The sum of five losses: objectness and boxes of proposals; classes, boxes and masks of objects."""
        losses: dict[str, Tensor] = model(*batch)
        return torch.stack(list(losses.values())).sum()

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        """Looks at every world_size-th test image; what is found there is kept for `findings`.

        One image at a time, as in torchvision's reference: in a batch small images are padded, which changes
        what is found in them, and batches differ between worlds.
        """
        self._found = []
        own = range(self._share.rank, len(self._test_ids), self._share.world_size)
        views = Views(self._test, self._test_ids, None, seen_only=True)
        for index, (images, _) in zip(own, self._loaded(views, [[index] for index in own]), strict=True):
            (result,) = model(images)
            boxes, labels, scores, masks = (
                result[key].cpu().numpy() for key in ("boxes", "labels", "scores", "masks")
            )
            categories = self._test.annotations.categories
            self._found += detections(
                self._test_ids[index], boxes, labels, scores, masks[:, 0] > MASK_THRESHOLD, categories
            )
        return {}, len(own)

    def findings(self) -> bytes:
        """This rank's detections."""
        return packed(self._found)

    def score(self, findings: Sequence[bytes]) -> Mapping[str, float]:
        """COCO's average precisions over all ranks' detections."""
        return average_precision(self._test.annotations.coco, self._test_ids, unpacked(findings))

    def _loaded(self, views: Views, batches: list[list[int]]) -> Iterator[Batch]:
        workers, device = self._options["workers"], self._share.device
        for loaded in load_batches(views, batches, workers, _together, device):
            yield self._ready(*loaded)

    def _ready(self, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Batch:
        device = self._share.device
        return (
            [image.to(device, non_blocking=True).float() / 255 for image in images],
            [
                {key: value.to(device, non_blocking=True) for key, value in target.items()}
                for target in targets
            ],
        )


class Synthetic(Coco):
    """One random batch again and again: the work of training without its data, for throughput."""

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        height = options["min_size"]
        width = min(options["max_size"], height * 4 // 3)
        made = partial(noise, width=width, height=height, classes=options["classes"], objects=OBJECTS)
        train = made(count=share.local_batch_size, seed=share.seed * 1_000_003 + share.rank)
        test = made(count=MADE_UP_TEST, seed=share.seed)
        limited = {**options, "train_examples": share.local_batch_size}
        super().__init__(
            limited, share, *(_in_memory(part, "made up", options["classes"]) for part in (train, test))
        )
        self.steps_per_epoch = steps_per_epoch(share, WORKLOADS["coco"].examples(options))
        views = Views(self._train, self._train_ids, None)
        self._batch = self._ready(*_together([views[index] for index in range(len(self._train_ids))]))

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The same bytes in every step."""
        for _ in range(first_step, self.steps_per_epoch):
            yield self._batch


class Views(Dataset[Any]):
    """Bytes `[3, H, W]` and target of an image by its place among `ids`, or a sentence on why there are none.

    Args:
        draws: what images are mirrored by, together with their place; None leaves them as they are.
        seen_only: whether the targets are left out.
    """

    def __init__(
        self, images: Images, ids: Sequence[int], draws: str | None, *, seen_only: bool = False
    ) -> None:
        self._images, self._ids, self._draws, self._seen_only = images, ids, draws, seen_only

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Tensor]] | str:
        """The image and its target as torchvision's detectors take them, but for bytes in place of floats."""
        try:
            return self._view(index)
        except DataError as error:
            return str(error)  # an exception would come out of the worker wrapped in its traceback

    def _view(self, index: int) -> tuple[Tensor, dict[str, Tensor]]:
        number = self._ids[index]
        pixels = self._images.pixels(number)
        mirrored = self._draws is not None and Random(f"{self._draws} {index}").random() < 0.5  # noqa: S311
        shown = np.ascontiguousarray((pixels[:, ::-1] if mirrored else pixels).transpose(2, 0, 1))
        if self._seen_only:
            return torch.from_numpy(shown), {}
        objects = self._images.annotations.objects(number)
        kept = objects.mirrored() if mirrored else objects
        return torch.from_numpy(shown), {key: torch.from_numpy(part) for key, part in kept._asdict().items()}


def build(options: Mapping[str, Any], share: Share) -> Coco:
    """The workload as the rank of `share` sees it."""
    if options["data"] == SYNTHETIC:
        return Synthetic(options, share)
    classes = options["classes"]
    if options["data"] == EMBEDDED:
        train, test = (_in_memory(part, "scenes of digits", classes) for part in digit_scenes())
        return Coco(options, share, train, test)
    year, hint = options["year"], how_to_point(options["data"])
    splits = tuple(f"{split}{year}" for split in ("train", "val"))
    root = staged(data_folder(options["data"]), ("annotations", *splits))
    train, test = (_photographed(root, split, classes, hint) for split in splits)
    return Coco(options, share, train, test)


def _photographed(root: Path, split: str, classes: int, hint: str) -> Images:
    annotations = read_annotations(root / "annotations" / f"instances_{split}.json", classes, hint)
    folder = root / split
    if not folder.is_dir():
        raise DataError(f"{folder} is not there; coco reads {split}/*.jpg: get them from {SOURCE}, {hint}")
    return Images(annotations, partial(_read, annotations, folder))


def _read(annotations: Annotations, folder: Path, number: int) -> Pixels:
    path = folder / annotations.file_name(number)
    image = read_photo(str(path), SOURCE)
    if image.size != annotations.size(number):
        said, there = ("x".join(map(str, size)) for size in (annotations.size(number), image.size))
        raise DataError(f"{path}: {there} pixels, {said} in {annotations.name}; get both again from {SOURCE}")
    return np.asarray(image)


def _in_memory(pictures: Pictures, name: str, classes: int) -> Images:
    return Images(Annotations(pictures.content, name, classes), pictures.pixels.__getitem__)


def _folder(data: str) -> Path:
    """Filter a file of weights lies that is named without a folder."""
    return data_folder(FILES if data in (EMBEDDED, SYNTHETIC) else data)


def _exactly(annotations: Annotations, wanted: int) -> list[int]:
    there = annotations.trainable()
    if len(there) < wanted:
        raise DataError(
            f"{annotations.name}: {len(there)} images with objects, {wanted} expected; complete them, or set "
            f"workload.options.train_examples: {len(there)} for this part"
        )
    return there[:wanted]


def _together(examples: list[Any]) -> tuple[list[Tensor], list[dict[str, Tensor]]] | str:
    """A batch, or the first thing wrong with it; images differ in size, so nothing is stacked."""
    for example in examples:
        if isinstance(example, str):
            return example
    images, targets = zip(*examples, strict=True)
    return list(images), list(targets)
