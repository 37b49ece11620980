"""Promise: every paper's figures can be run and drawn; a mistake in a list is one line before any run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from analysis.figures import FIGURES
from harness.cli import main
from harness.study.papers import FOLDER, PaperError, read_paper
from harness.study.sweep import read_sweep
from harness.workloads import WORKLOADS
from tests.harness.test_cli_starts import RUNNER

PAPERS = sorted((path.parent.name, path.stem) for path in FOLDER.glob("*/*.yaml"))


def test_the_four_papers_exist():
    assert {name for name, _ in PAPERS} == {"sc20", "tpds22", "dp_kfac", "nlcg"}


@pytest.mark.parametrize(("name", "size"), PAPERS)
def test_every_figure_exists_and_every_sweep_can_be_planned(name, size):
    paper, files = read_paper(name, size)
    assert paper.paper == name
    assert {figure.figure for figure in paper.figures} <= set(FIGURES)
    assert {path.stem for path in (FOLDER / name / size).glob("*.yaml")} == set(files)
    sweeps = [read_sweep(path) for path in files.values()]
    assert len({sweep.name for sweep in sweeps}) == len(sweeps)
    assert all(sweep.name.startswith(f"{name}-{size}-") for sweep in sweeps)
    assert sum(len(sweep.cells) for sweep in sweeps) < 300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"figures": [{"shows": "x", "figure": "scaling", "sweep": "nowhere"}]},
            "nowhere.yaml does not exist",
        ),
        ({"pictures": []}, "pictures is not a known key; allowed: paper, title"),
        ({"figures": [{"shows": "x", "figure": "scaling"}]}, "sweep"),
    ],
)
def test_a_mistake_names_file_and_field(tmp_path, change, message):
    folder = tmp_path / "some"
    (folder / "small").mkdir(parents=True)
    (folder / "small" / "time.yaml").write_text("sweep: x\n")
    content = {"paper": "some", "title": "t", "about": "a", "summary": "time", "figures": []}
    (folder / "small.yaml").write_text(yaml.safe_dump(content | change))
    with pytest.raises(PaperError, match=r"small\.yaml") as error:
        read_paper("some", "small", tmp_path)
    assert message in str(error.value)


def test_an_unknown_paper_or_size_names_the_known_ones(capsys):
    assert main(["reproduce", "sc21"]) == 2
    error = capsys.readouterr().err
    assert "sc20 --size small" in error
    assert "did you mean sc20" in error
    assert main(["reproduce", "sc20", "--size", "huge"]) == 2
    error = capsys.readouterr().err
    assert "sc20 has no size 'huge'; allowed: " in error
    assert "did you mean sc20" not in error
    for name, size in (("../papers/sc20", "small"), ("sc20", "../sc20/small")):  # names are no paths
        with pytest.raises(PaperError, match=r"no such paper; available|has no size"):
            read_paper(name, size)


def test_without_runs_there_is_nothing_to_draw(tmp_path, capsys):
    assert main(["reproduce", "sc20", "--report-only", "--runs", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert f"no runs yet at {tmp_path}/" in error
    assert "leave --report-only out" in error
    assert not list(Path(tmp_path).iterdir())


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


@pytest.mark.parametrize("size", ["full", "medium", "embedded", "scenes"])
def test_a_size_has_the_data_the_worlds_and_the_source_that_its_name_promises(size):
    for path in [path for path in SWEEPS if path.parent.name == size]:
        text, cells = path.read_text(), read_sweep(path).cells
        data = "files" if size in ("full", "medium") else "embedded"
        assert {cell.workload.options["data"] for cell in cells} == {data}, path
        most = {"full": 512, "medium": 8}.get(size, 2)
        assert max(cell.world_size for cell in cells) <= most, path
        if size == "full":
            assert text.startswith("# "), path
            assert (path.parent.parent / "small.yaml").is_file()
        if size == "medium":
            assert {cell.seed for cell in cells} == set(range(6)), path
            comment = "".join(line for line in text.splitlines(keepends=True) if line.startswith("#"))
            assert re.search(r"hyperparameters\.csv|(full|mask|dice|batch)[/.]", comment), path


def test_the_seeds_of_the_headlines_pilot_tuning_and_study_are_disjoint():
    used: dict[str, set[int]] = {}
    names = ("pilot", "tuning", "tuning-again", "batch-128-tuning", "batch-2048-pilot", "batch-2048-tuning")
    for name in names:
        content = read_sweep(Path(f"jobs/sweeps/headline/{name}.yaml")).content
        used[name], study = set(content.all_seeds), content.tuning.study
        if name in {"tuning", "tuning-again", "batch-2048-tuning"}:
            used[f"study of {name}"] = set(study.seeds)
            assert len(used[f"study of {name}"]) == 6  # blocks
        if name.endswith("pilot"):
            used[f"{name} again"] = set(study.seeds)
    used["map"] = {cell.seed for cell in read_sweep(Path("jobs/sweeps/headline/map.yaml")).cells}
    assert sum(map(len, used.values())) == len(set().union(*used.values()))


def test_sc20_has_the_released_hyperparameters():
    """The rows of the release that the papers' table of hyperparameters is about."""
    cells = {
        (cell.method, cell.world_size): cell for cell in read_sweep(FOLDER / "sc20/full/time.yaml").cells
    }
    sgd, kfac = cells["sgd", 64], cells["kfac-opt", 16]
    assert (sgd.training.epochs, sgd.optimizer.decay_epochs) == (90, (30, 60, 80))
    assert (kfac.training.epochs, kfac.optimizer.decay_epochs) == (55, (25, 35, 40, 45, 50))
    assert (kfac.kfac.factor_update_steps, kfac.kfac.inverse_update_steps) == (200, 2000)
    damping = kfac.kfac.damping
    assert (damping.initial, damping.factor, damping.at) == (0.001, 0.5, (40, 80))
    for cell in (sgd, kfac):
        assert (cell.optimizer.lr, cell.optimizer.lr_scaling) == (0.0125, "linear")
        assert cell.training.local_batch_size == 32
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
