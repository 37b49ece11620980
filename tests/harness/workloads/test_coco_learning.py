"""Promise: Mask R-CNN is torchvision's, trains on one rank and two, with K-FAC, and goes on bit for bit."""

from __future__ import annotations

import pytest
import torch

from harness.workloads.coco.annotations import METRICS
from harness.workloads.models.detection import mask_rcnn
from kfac_core import KFAC, KFACConfig
from tests.harness.checkpoint.runs import cell, new_attempt, train
from tests.harness.workloads.batch_files import options, torchvision_or_skip
from tests.harness.workloads.coco_folders import coco

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:K-FAC. (the number of loss terms is guessed|no statistics of):RuntimeWarning"
    ),
]

SMALL = {
    "data": "embedded", "classes": 10, "model": "maskrcnn_resnet18_fpn", "width": 0.125, "min_size": 96,
    "max_size": 96, "anchor_size": 16, "proposals": 60, "sampled_boxes": 16, "workers": 0,
}  # fmt: skip
ROI_HEADS = ["backbone", "rpn"]
EVERYTHING = [r"backbone\.body\.layer[34]"]  # but the largest factors, minutes to decompose
KFAC_FIELDS = {"damping": 0.003, "factor_update_steps": 1, "inverse_update_steps": 3}


@pytest.fixture(autouse=True)
def vision():
    return torchvision_or_skip()


@pytest.fixture
def workload():
    return coco("embedded", batch=2, **{**SMALL, "train_examples": 8, "test_examples": 4})


def running(method, world_size, skip=None, **changes):
    """A cell of eight steps in two epochs on so many ranks."""
    fields = {
        "workload": {"name": "coco", "options": options("coco", **SMALL, train_examples=16, test_examples=4)},
        "target": {"metric": "mask_map", "at_least": 0.9}, "optimizer": {"lr": 0.01},
        "training": {"global_batch_size": 4, "epochs": 2, "window_steps": 3},
    }  # fmt: skip
    if skip is not None:
        fields["kfac"] = {**KFAC_FIELDS, "strategy": method, "skip": skip}
    return cell("sgd", world_size, **{**fields, **changes})


@pytest.mark.parametrize("given", [False, True])
def test_by_default_it_is_torchvisions_network(vision, tmp_path, given):
    weights = None
    if given:
        weights = tmp_path / "resnet50.pth"
        torch.save(vision.models.resnet50(weights=None).state_dict(), weights)
    ours = mask_rcnn(options("coco"), weights)
    theirs = vision.models.detection.maskrcnn_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=81
    )
    mine = {name: value.shape for name, value in ours.state_dict().items()}
    wanted = {name: value.shape for name, value in theirs.state_dict().items()}
    if given:  # frozen batch normalisation counts no batches
        wanted = {name: shape for name, shape in wanted.items() if not name.endswith("num_batches_tracked")}
    assert mine == wanted
    trained = {name for name, value in ours.named_parameters() if value.requires_grad}
    if given:
        frozen = ("backbone.body.conv1", "backbone.body.bn1", "backbone.body.layer1")
        assert {name for name, _ in ours.named_parameters()} - trained == {
            name for name, _ in ours.named_parameters() if name.startswith(frozen)
        }
        state = torch.load(weights, weights_only=True)
        assert torch.equal(ours.backbone.body.layer3[0].conv1.weight, state["layer3.0.conv1.weight"])
        return
    assert len(trained) == len(list(theirs.parameters()))
    ours.load_state_dict(theirs.state_dict())
    image = torch.rand(3, 80, 100)
    target = {
        "boxes": torch.tensor([[10.0, 10.0, 50.0, 60.0]]), "labels": torch.tensor([7]),
        "masks": torch.ones(1, 80, 100, dtype=torch.uint8),
    }  # fmt: skip
    for model in (ours, theirs):
        model.transform.min_size, model.transform.max_size = (96,), 128  # a test's size
    losses = []
    for model in (ours, theirs):
        torch.manual_seed(0)
        losses.append({name: float(loss.detach()) for name, loss in model([image], [target]).items()})
    assert losses[0] == losses[1]
    assert len(losses[0]) == 5


def test_the_same_seed_gives_the_same_losses_and_ranks_sample_differently(workload):
    def losses(rank):
        torch.manual_seed(3)
        mine = coco("embedded", rank, 2, 4, **{**SMALL, "train_examples": 8})
        model = mine.model()
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        batch = next(coco("embedded", 0, 2, 4, **{**SMALL, "train_examples": 8}).batches(0))
        return weights, float(mine.loss(model, batch).detach())

    (w0, l0), (again, l_again), (w1, l1) = losses(0), losses(0), losses(1)
    assert torch.equal(w0, again)
    assert torch.equal(w0, w1)
    assert l0 == l_again
    assert l0 != l1


@pytest.mark.parametrize(("skip", "layers"), [(ROI_HEADS, 10), (EVERYTHING, 31)])
def test_kfac_takes_the_roi_heads_or_everything(workload, skip, layers):
    """Two layers and two predictors of boxes; four convolutions, a transposed one and logits of masks: ten.

    Everything: 10 convolutions of the ResNet-18's first half, 8 of the pyramid and 3 of the RPN besides.
    """
    torch.manual_seed(0)
    model = workload.model()
    kfac = KFAC(model, KFACConfig.sc20(**KFAC_FIELDS, skip=tuple(skip)), lr=0.01)
    names = [shape.name for shape in kfac.shapes]
    assert len(names) == layers == len(set(names))
    assert sum(name.startswith("roi_heads.") for name in names) == 10
    for batch in workload.batches(0):
        model.zero_grad()
        workload.loss(model, batch).backward()
        kfac.step()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert kfac.failures == []


def test_a_step_without_an_object_keeps_the_mask_heads_factors(workload):
    torch.manual_seed(0)
    model = workload.model()
    kfac = KFAC(model, KFACConfig.sc20(**KFAC_FIELDS, skip=("backbone", "rpn")), lr=0.01)
    images, targets = next(workload.batches(0))
    nothing = [
        {"boxes": torch.zeros(0, 4), "labels": target["labels"][:0], "masks": target["masks"][:0]}
        for target in targets
    ]
    mask_layers = [index for index, shape in enumerate(kfac.shapes) if "mask" in shape.name]
    for batch, updates in (((images, nothing), 0), ((images, targets), 1), ((images, nothing), 1)):
        model.zero_grad()
        workload.loss(model, batch).backward()
        kfac.step()
        counted = {int(kfac._factors.updates[index, kind]) for index in mask_layers for kind in "ag"}
        assert counted == {updates}
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(("method", "skip"), [("comm_opt", ROI_HEADS), ("mem_opt", EVERYTHING)])
def test_two_ranks_train_alike_also_when_one_has_no_object(world, tmp_path, method, skip):
    asked = running(method, 2, skip)
    ranks = world(2).run(train_with_an_empty_rank, asked, new_attempt(tmp_path, asked))
    assert ranks[0].result.parameters_sha256 == ranks[1].result.parameters_sha256
    assert ranks[0].result.stop_reason == "epochs"
    assert ranks[0].result.steps == 8


def train_with_an_empty_rank(rank, world_size, asked, attempt):
    return train(rank, world_size, asked, attempt, interfere=empty_on_rank_one)


def empty_on_rank_one(trainer):
    """Every other step of rank 1 has no object in it: its mask head sees nothing."""
    if trainer.world.rank != 1:
        return
    batches = trainer.workload.batches

    def some_without(epoch, first_step=0):
        for step, (images, targets) in enumerate(batches(epoch, first_step)):
            bare = [{key: value[:0] for key, value in target.items()} for target in targets]
            yield images, (bare if step % 2 else targets)

    trainer.workload.batches = some_without


def test_a_resumed_run_is_the_same_run(world, tmp_path, world_size=2):
    """Stopped within an epoch: what the network samples next is in the checkpoint."""
    asked = running("mem_opt", world_size, ROI_HEADS)
    whole_attempt, first = (new_attempt(tmp_path / name, asked) for name in ("whole", "cut"))
    whole = world(world_size).run(train, asked, whole_attempt)
    stopped = world(world_size).run(train_until, asked, first, 5)
    assert {run.result.stop_reason for run in stopped} == {"preempted"}
    second = new_attempt(tmp_path / "cut", asked, continues=1)
    resumed = world(world_size).run(train, asked, second)
    assert [run.bits for run in resumed] == [run.bits for run in whole]
    assert resumed[0].numbers()[-1] == whole[0].numbers()[-1]


def train_until(rank, world_size, asked, attempt, step):
    return train(rank, world_size, asked, attempt, stop_before=step)


def test_it_learns_what_it_is_shown():
    """Four scenes again and again, tested on themselves; an overlap of a half is enough."""
    torch.manual_seed(0)
    workload = coco("embedded", batch=4, **{**SMALL, "train_examples": 4, "augment": False})
    workload._test, workload._test_ids = workload._train, workload._train_ids
    model = workload.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for epoch in range(120):
        for batch in workload.batches(epoch):
            optimizer.zero_grad()
            loss = workload.loss(model, batch)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    with torch.no_grad():
        workload.evaluate(model.eval())
    scores = workload.score([workload.findings()])
    assert set(scores) == set(METRICS)
    assert sum(losses[-4:]) < 0.6 * sum(losses[:4])
    assert min(scores["box_ap50"], scores["mask_ap50"]) > 0.6
