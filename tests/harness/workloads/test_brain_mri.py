"""Promise: published files are read as they are laid out, masks stay on their pixels, and U-Net learns."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from PIL import Image

from harness.errors import DataError
from harness.workloads import WORKLOADS
from harness.workloads.brain_mri.brain_mri import BrainMRI, build, moved, scenes, soft_dice, split_patients
from harness.workloads.models.vision import UNet
from kfac_core import KFAC, KFACConfig
from tests.harness.workloads.image_folders import SLICES, write_patients
from tests.harness.workloads.texts import share

SIDE = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_patients(tmp_path_factory.mktemp("lgg"))


def workload(folder: Path | str, rank: int = 0, world_size: int = 1, **changes) -> BrainMRI:
    given = {"data": str(folder), "image_size": SIDE, "width": 0.125, "test_patients": 1, "augment": False}
    options = {**WORKLOADS["brain_mri"].options, **given, **changes}
    return build(options, share(rank, world_size, batch=4))


def test_slices_come_in_the_order_of_their_numbers_without_the_first_and_the_last(folder):
    train, test = split_patients(folder, 1, SIDE, "")
    assert len(train) == 3
    assert len(test) == 1
    for patient in (*train, *test):
        number = int(patient.name.split("_")[2])
        assert patient.pixels[:, 0, 0, 0].tolist() == [10 * number + n for n in range(2, SLICES)]
        assert patient.masks.sum((1, 2)).tolist() == [SIDE * n for n in range(2, SLICES)]
    again, _ = split_patients(folder, 1, SIDE, "")
    assert [patient.name for patient in again] == [patient.name for patient in train]


def test_dice_is_that_of_the_counts(folder):
    masks = torch.tensor([[[1, 1, 0, 0]]]).bool()
    scores = torch.tensor([[[[50.0, -50.0, 50.0, -50.0]]]])
    assert float(soft_dice(scores, masks)) == pytest.approx((2 * 1 + 1) / (2 + 2 + 1))

    class Knows(torch.nn.Module):
        def forward(self, images):
            return torch.full((len(images), 1, SIDE, SIDE), 50.0)  # all is abnormal

    sums, _ = workload(folder).evaluate(Knows())
    share_of_masks = sum(range(2, SLICES)) / (SIDE * (SLICES - 2))
    assert sums["iou"] == pytest.approx(share_of_masks)
    assert sums["dice"] == pytest.approx(2 * share_of_masks / (1 + share_of_masks))


def test_masks_move_with_their_pixels():
    masks = torch.zeros(8, 64, 64, dtype=torch.bool)
    masks[:, 20:44, 12:30] = True
    images = masks.float().unsqueeze(1).expand(-1, 3, -1, -1)
    moved_images, moved_masks = moved(images, masks, [Random(seed) for seed in range(8)])  # noqa: S311
    assert not torch.equal(moved_masks, masks)
    inside, outside = moved_images[:, 0][moved_masks], moved_images[:, 0][~moved_masks]
    assert float(inside.min()) >= 0.25  # pixels on an edge lie between
    assert float(outside.max()) <= 0.75
    assert float(moved_masks.sum()) == pytest.approx(float(masks.sum()), rel=0.1)


def test_scenes_have_the_ink_of_their_digits():
    (train,), test = scenes()
    assert (len(train.masks), len(test)) == (400, 100)
    assert all(0.01 < patient.masks.mean() < 0.4 for patient in test)
    bright = train.pixels.max(3)
    assert bright[train.masks].mean() > bright[~train.masks].mean() + 40


def test_the_unet_has_the_published_size_and_kfac_takes_all_its_convolutions():
    model = UNet()
    assert sum(each.numel() for each in model.parameters()) == 7_763_041  # of the reference's torch.hub model
    kfac = KFAC(UNet(4), KFACConfig.sc20(kl_clip=None))
    assert len(kfac.shapes) == 23  # 18 of 3 x 3, 4 transposed, the head
    assert all("BatchNorm" in plain for plain in kfac.plain_modules)


@pytest.mark.slow
def test_unet_learns_the_scenes_in_an_epoch_or_two():
    ours = workload("embedded", image_size=96, train_examples=80, augment=True)
    torch.manual_seed(0)
    model = ours.model()
    kfac = KFAC(model, KFACConfig.sc20(factor_update_steps=2, inverse_update_steps=4), lr=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for images, masks in (batch for epoch in range(2) for batch in ours.batches(epoch)):
        optimizer.zero_grad()
        loss = ours.loss(model, (images, masks))
        loss.backward()
        kfac.step()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 0.6
    assert sum(losses[-5:]) / 5 < 0.45


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda root: None, "holds out, got 2"),
        (lambda root: next(root.glob("*/*_3.tif")).write_bytes(b"II*\0"), "not a readable image"),
        (lambda root: next(root.glob("*/*_3.tif")).unlink(), "_3.tif"),
        (lambda root: [each.unlink() for each in (root / "TCGA_1").iterdir()], "three slices or more, got 0"),
        (lambda root: (root / "TCGA_1" / "x_mask.tif").touch(), "must end with _<number>_mask.tif"),
    ],
    ids=["too few patients", "damaged", "missing", "empty", "no number"],
)
def test_missing_and_damaged_files_are_named(tmp_path, harm, message):
    for patient in range(2):
        (tmp_path / f"TCGA_{patient}").mkdir()
        for number in range(1, 6):
            for end in ("", "_mask"):
                path = tmp_path / f"TCGA_{patient}" / f"TCGA_{patient}_{number}{end}.tif"
                Image.fromarray(np.zeros((16, 16), np.uint8)).save(path)
    harm(tmp_path)
    held_out = 2 if "got 2" in message else 1
    with pytest.raises(DataError, match=message):
        split_patients(tmp_path, held_out, 16, "or name another folder")


def test_a_missing_folder_and_too_many_slices_are_errors(folder, tmp_path):
    with pytest.raises(DataError, match="does not exist; get the files from https://www"):
        workload(tmp_path / "none")
    with pytest.raises(DataError, match="must have 99 slices, got 30; complete them"):
        workload(folder, train_examples=99)
