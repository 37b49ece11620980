"""Promise: every sweep of a paper can be planned on a login node and matches its folder's name."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.study.sweep import read_sweep
from harness.workloads import WORKLOADS
from tests.harness.test_cli_starts import RUNNER

FOLDER = Path("jobs/papers")
SWEEPS = sorted(FOLDER.glob("*/*/*.yaml"))


@pytest.mark.slow
def test_all_are_planned_without_torch():
    loop = RUNNER.replace(
        "sys.exit(main())", "sys.exit(max(main(['plan', '-f', file]) for file in sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", loop, *map(str, SWEEPS)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", [path for path in SWEEPS if path.parent.name == "full"], ids=str)
def test_a_full_sweep_has_the_papers_data_its_source_and_a_small_sibling(path):
    text, cells = path.read_text(), read_sweep(path).cells
    assert text.startswith("# ")
    assert {cell.workload.name for cell in cells} <= {"cifar10", "cifar100", "imagenet", "multi30k", "bert"}
    assert {cell.workload.options["data"] for cell in cells} == {"files"}
    assert (path.parent.parent / "small.yaml").is_file()


@pytest.mark.parametrize("path", [path for path in SWEEPS if path.parent.name == "embedded"], ids=str)
def test_an_embedded_sweep_needs_no_download_and_two_ranks_at_most(path):
    cells = read_sweep(path).cells
    assert {cell.workload.options["data"] for cell in cells} == {"embedded"}
    assert max(cell.world_size for cell in cells) <= 2
    assert len(cells) <= 20


MEDIUM = [path for path in SWEEPS if path.parent.name == "medium"]


@pytest.mark.parametrize("path", MEDIUM, ids=str)
def test_a_medium_sweep_fits_one_node_repeats_six_times_and_names_its_source(path):
    text, cells = path.read_text(), read_sweep(path).cells
    assert max(cell.world_size for cell in cells) <= 8
    assert {cell.seed for cell in cells} == set(range(6))
    assert {cell.workload.options["data"] for cell in cells} == {"files"}
    comment = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
    assert re.search(r"results/published/hyperparameters\.csv|(full|mask|dice|batch)[/.]", comment), comment


def test_a_medium_sweep_trains_what_its_full_sibling_trains():
    """Of sweeps that say they are `full/...` with fewer worlds or more repeats."""
    for paper, name in (("sc20", "cifar10"), ("dp_kfac", "resnet110"), ("nlcg", "batch")):
        full, medium = ({_hash(cell) for cell in read_sweep(FOLDER / paper / size / f"{name}.yaml").cells}
                        for size in ("full", "medium"))  # fmt: skip
        assert medium <= full, (paper, name)


def _hash(cell) -> str:
    """Of what is trained, whatever the seed; NLCG's worlds differ, its batches and rates do not."""
    same = {"seed": 0, "world_size": 8} if cell.training.scaling == "strong" else {"seed": 0}
    return type(cell).model_validate(cell.model_dump() | same).content_hash


def test_sc20_has_the_released_hyperparameters():
    """The rows of the release that the papers' table of hyperparameters is about."""
    cells = {
        (cell.method, cell.world_size): cell for cell in read_sweep(FOLDER / "sc20/full/time.yaml").cells
    }
    sgd, kfac = cells["sgd", 64], cells["kfac-opt", 16]
    assert (sgd.training.epochs, sgd.optimizer.decay_epochs) == (90, (30, 60, 80))
    assert (kfac.training.epochs, kfac.optimizer.decay_epochs) == (55, (25, 35, 40, 45, 50))
    assert (kfac.kfac.factor_update_steps, kfac.kfac.inverse_update_steps) == (200, 2000)
    assert (kfac.kfac.damping.initial, kfac.kfac.damping.factor, kfac.kfac.damping.at) == (
        0.001,
        0.5,
        (40, 80),
    )
    for cell in (sgd, kfac):
        assert (cell.optimizer.lr, cell.optimizer.lr_scaling, cell.training.local_batch_size) == (
            0.0125,
            "linear",
            32,
        )
        assert (cell.optimizer.weight_decay, cell.workload.options["label_smoothing"]) == (5e-5, 0.1)


def test_the_transformer_has_the_released_hyperparameters():
    """The release's row of the table; its loss is a sum, over 1,924 tokens a rank in our vocabulary."""
    tokens, cells = 1924, read_sweep(FOLDER / "dp_kfac/full/transformer.yaml").cells
    for cell in cells:
        sizes = ("layers", "hidden", "feed_forward", "heads", "dropout", "tied", "source", "target")
        assert [cell.workload.options[name] for name in sizes] == [6, 512, 2048, 8, 0.1, True, "de", "en"]
        assert (cell.world_size, cell.training.local_batch_size, cell.training.epochs) == (8, 128, 200)
        assert cell.optimizer.lr == pytest.approx(1e-6 * tokens, rel=0.02)
        assert cell.optimizer.weight_decay == pytest.approx(5e-4 / tokens, rel=0.02)
        assert (cell.optimizer.lr_scaling, cell.optimizer.momentum) == ("linear", 0.9)
        assert (cell.optimizer.warmup_epochs, cell.optimizer.decay_epochs) == (0, ())
        if cell.kfac is not None:
            kfac = cell.kfac
            assert (kfac.damping, kfac.factor_decay, kfac.kl_clip) == (0.03, 0.95, 0.001)
            assert (kfac.factor_update_steps, kfac.inverse_update_steps, kfac.sequence) == (1, 1, "reduce")


def test_mask_rcnn_has_the_released_hyperparameters():
    """The release's row of the table of hyperparameters; its counts are steps of 128 images."""
    for cell in read_sweep(FOLDER / "tpds22/maskrcnn/coco.yaml").cells:
        steps_per_epoch = WORKLOADS["coco"].examples(cell.workload.options) // 128
        assert (cell.world_size, cell.training.global_batch_size) == (64, 128)
        assert (cell.optimizer.lr, cell.optimizer.momentum, cell.optimizer.weight_decay) == (0.16, 0.9, 1e-4)
        epochs = (cell.optimizer.warmup_epochs, *cell.optimizer.decay_epochs, cell.training.epochs)
        for published, ours in zip((800, 7000, 11000, 12000), epochs, strict=True):
            assert ours * steps_per_epoch == pytest.approx(published, rel=0.01)
        assert (cell.target.metric, cell.target.value) == ("box_map", 0.377)
        if cell.kfac is not None:
            kfac = cell.kfac
            assert (kfac.damping, kfac.factor_decay, kfac.kl_clip) == (0.003, 0.95, 0.001)
            assert (kfac.factor_update_steps, kfac.inverse_update_steps) == (50, 500)
            assert kfac.skip == ("backbone", "rpn")


def test_mask_rcnn_in_small_needs_no_download_and_two_ranks_at_most():
    cells = read_sweep(FOLDER / "tpds22/scenes/maskrcnn.yaml").cells
    assert {cell.workload.options["data"] for cell in cells} == {"embedded"}
    assert {cell.world_size for cell in cells} == {1, 2}
    assert {cell.kfac.skip for cell in cells if cell.kfac is not None} == {("backbone", "rpn")}
