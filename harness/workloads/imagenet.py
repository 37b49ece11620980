"""ImageNet-1k (Russakovsky et al. 2015): photographs in folders, read by worker processes.

The recipe is SC20's: random-resized crops and mirrors, label smoothing; warm-up and milestones are the
optimizer's. What a rank is shown is a matter of seed, epoch and example, whatever the world and the number of
workers. ResNets are this repository's, layer for layer torchvision's; other networks come from torchvision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from harness.errors import DataError
from harness.workloads import WORKLOADS
from harness.workloads.cards.vision import EMBEDDED, SYNTHETIC
from harness.workloads.models import imagenet_resnet
from harness.workloads.sources.folders import data_folder, how_to_point
from harness.workloads.sources.loading import import_torchvision, load_batches
from harness.workloads.sources.order import generator_of, local_batches, steps_per_epoch
from harness.workloads.sources.photos import (
    Photos,
    list_photos,
    middle_view,
    read_photo,
    training_view,
    unpack_embedded,
)
from harness.workloads.sources.staging import staged
from harness.workloads.workload import Share

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, as torchvision's models expect
SIDES = {"inception_v3": 299}  # 224 for the others

Batch = tuple[Tensor, Tensor]


class ImageNet:
    """ImageNet as one rank sees it; a subclass brings the batches."""

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        self._options, self._share = options, share
        self._side = options["image_size"] or SIDES.get(options["model"], 224)
        self._examples = WORKLOADS["imagenet"].examples(options)
        mean, deviation = (
            torch.tensor(values, device=share.device).view(3, 1, 1) for values in (MEAN, DEVIATION)
        )
        self._scale, self._shift = 1 / (255 * deviation), -mean / deviation
        self.steps_per_epoch = steps_per_epoch(share, self._examples)

    def model(self) -> nn.Module:
        """The network that `model` names.

        With `channels_last` its inputs say which convolutions run; the weights stay as they are, so that they
        lie like their gradients in the buffer that is averaged.
        """
        return _network(self._options["model"], self._options["classes"]).to(self._share.device)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy, with `label_smoothing` of the probability spread over all classes."""
        images, labels = batch
        return functional.cross_entropy(
            model(images), labels, label_smoothing=self._options["label_smoothing"]
        )

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        """Correct predictions and summed loss over this rank's share of the test images."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._share.device)
        count = 0
        for images, labels in self._test_batches():
            scores = model(images)
            sums[0] += (scores.argmax(1) == labels).sum()
            sums[1] += functional.cross_entropy(scores, labels, reduction="sum")
            count += len(labels)
        return {"accuracy": float(sums[0]), "loss": float(sums[1])}, count

    def _test_batches(self) -> Iterable[Batch]:
        raise NotImplementedError

    def _ready(self, pixels: Tensor, labels: Tensor) -> Batch:
        """Bytes `[B, 3, side, side]` as a model wants them."""
        device = self._share.device
        images = torch.addcmul(self._shift, pixels.to(device, non_blocking=True).float(), self._scale)
        return images.contiguous(memory_format=self._format), labels.to(device, non_blocking=True)

    @property
    def _format(self) -> torch.memory_format:
        return torch.channels_last if self._options["channels_last"] else torch.contiguous_format


class Photographed(ImageNet):
    """The photographs of a folder."""

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        super().__init__(options, share)
        if options["data"] == EMBEDDED:
            root, test_split = unpack_embedded(), "test"
        else:
            root, test_split = staged(data_folder(options["data"]), ("train", "val")), "val"
        hint = how_to_point(options["data"])
        self._train = _exactly(root, list_photos(root / "train", options["classes"], hint), self._examples)
        test = list_photos(root / test_split, options["classes"], hint)
        self._test = test.limited(options["test_examples"] or len(test.paths))

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Shuffled and cropped anew each epoch; the incomplete last batch is left out."""
        order = torch.randperm(self._examples, generator=generator_of(self._share, epoch))
        mine = [indices.tolist() for indices in local_batches(self._share, order, first_step)]
        draws = f"{self._share.seed} {epoch}" if self._options["augment"] else None
        return self._loaded(self._train, draws, mine)

    def _test_batches(self) -> Iterator[Batch]:
        indices = range(self._share.rank, len(self._test.paths), self._share.world_size)
        batch = self._share.local_batch_size
        mine = [list(indices[start : start + batch]) for start in range(0, len(indices), batch)]
        return self._loaded(self._test, None, mine)

    def _loaded(self, photos: Photos, draws: str | None, batches: list[list[int]]) -> Iterator[Batch]:
        views, workers = Views(photos, self._side, draws), self._options["workers"]
        for loaded in load_batches(views, batches, workers, _together, self._share.device):
            yield self._ready(*loaded)


class Synthetic(ImageNet):
    """One random batch again and again: the work of training without its data, for throughput."""

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
            yield self._ready(self._pixels, self._labels)

    def _test_batches(self) -> Iterator[Batch]:
        yield self._ready(self._pixels, self._labels)


class Views(Dataset[Any]):
    """A photograph's pixels and label by its number, or a sentence on why there are none.

    Args:
        draws: what random views are drawn by, together with the photograph's number; None shows the middle.
    """

    def __init__(self, photos: Photos, side: int, draws: str | None) -> None:
        self._photos, self._side, self._draws = photos, side, draws

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], int] | str:
        """Bytes `[side, side, 3]` and the label."""
        try:
            image = read_photo(self._photos.paths[index])
        except DataError as error:
            return str(error)  # an exception would come out of the worker wrapped in its traceback
        if self._draws is None:
            view = middle_view(image, self._side)
        else:
            view = training_view(image, self._side, Random(f"{self._draws} {index}"))  # noqa: S311  no secret
        return view, int(self._photos.labels[index])


def build(options: Mapping[str, Any], share: Share) -> ImageNet:
    """The workload as the rank of `share` sees it."""
    return Synthetic(options, share) if options["data"] == SYNTHETIC else Photographed(options, share)


def _together(examples: list[Any]) -> tuple[Tensor, Tensor] | str:
    """A batch `[B, 3, side, side]`, channels innermost in memory, or the first thing wrong with it."""
    for example in examples:
        if isinstance(example, str):
            return example
    views, labels = zip(*examples, strict=True)
    return torch.from_numpy(np.stack(views)).permute(0, 3, 1, 2), torch.tensor(labels)


def _exactly(root: Path, photos: Photos, wanted: int) -> Photos:
    there = len(photos.paths)
    if there < wanted:
        raise DataError(
            f"{root / 'train'}: {there} images, {wanted} expected; complete them, or set "
            f"workload.options.train_examples: {there} for this part"
        )
    return photos.limited(wanted)


def _network(name: str, classes: int) -> nn.Module:
    if name.startswith("resnet"):
        return imagenet_resnet(int(name.removeprefix("resnet")), classes)
    instead = ", or use resnet50, resnet101 or resnet152, which need none"
    models = import_torchvision(f"workload.options.model={name}", "vision", instead).models
    if name == "densenet201":
        network: nn.Module = models.densenet201(num_classes=classes)
    else:
        # without the auxiliary classifier, whose gradient would enter the shared layers' factors
        network = models.inception_v3(num_classes=classes, aux_logits=False, init_weights=True)
    return network
