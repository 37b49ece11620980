"""A study runs in blocks with every arm once; a block stays on one machine and is archived when complete."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from analysis.records.loading import load
from harness.cell import Cell
from harness.cli import main
from harness.errors import StoreError
from harness.runs.archive import read_manifest
from harness.runs.store import SweepFolder, sweep_folder
from harness.study.blocks import Block, blocks_of, open_blocks, run_blocks
from tests.analysis.conftest import Plan, make_cell
from tests.analysis.hand_made import Run, write

METHODS, SEEDS = ("sgd", "comm_opt", "dp_kfac"), (0, 1, 2, 3)


class Machine:
    """Runs cells at once, on a clock of its own: a minute each."""

    def __init__(self, folder: SweepFolder, name: str, breaks_at: int = -1) -> None:
        self.folder, self.name, self.now, self.ran, self.breaks_at = folder, name, 0.0, [], breaks_at
        self.ran: list[Cell]

    def run(self, cell: Cell) -> None:
        if len(self.ran) == self.breaks_at:
            raise KeyboardInterrupt
        self.ran.append(cell)
        self.now += 60
        write(self.folder.stage(cell).new_attempt(), cell, Run(cell.method, 1, cell.seed, 3, 1.0))

    def go(self, blocks: list[Block], into: Path, minutes: float) -> list[str]:
        done = run_blocks(blocks, self.folder, into, minutes, self.run, lambda: self.now, self.name)
        return [block.name for block in done]


@pytest.fixture
def study(tmp_path: Path) -> Callable[[], list[Block]]:
    cells = [make_cell(method, 1, seed, Plan(), {}) for method in METHODS for seed in SEEDS]
    return lambda: open_blocks(blocks_of(cells), tmp_path / "archives")


def test_a_block_has_every_arm_of_a_seed_trial_and_world_size_once(study: Callable[[], list[Block]]) -> None:
    for block, seed in zip(study(), SEEDS, strict=True):
        assert Counter(cell.method for cell in block.cells) == dict.fromkeys(METHODS, 1)
        assert {cell.seed for cell in block.cells} == {seed}
    cells = [make_cell(method, size, 0, Plan(), {}) for method in METHODS for size in (2, 1)]
    assert [(block.name, len(block.cells)) for block in blocks_of(cells)] == [
        ("p1-seed-0", 3), ("p2-seed-0", 3),
    ]  # fmt: skip
    cells = [
        make_cell(method, 1, 7, Plan(), {"optimizer.lr": rate}).model_copy(update={"trial": trial})
        for method in METHODS
        for trial, rate in ((1, 0.1), (2, 0.2))
    ]
    assert [(block.name, len(block.cells)) for block in blocks_of(cells)] == [
        ("p1-seed-7-trial-01", 3), ("p1-seed-7-trial-02", 3),
    ]  # fmt: skip


def test_no_block_begins_that_would_end_too_late(tmp_path: Path, study: Callable[[], list[Block]]) -> None:
    machine = Machine(sweep_folder("synthetic", tmp_path / "runs"), "a")
    assert machine.go(study(), tmp_path / "archives", minutes=8) == [
        "p1-seed-0",
        "p1-seed-1",
    ]  # 3 minutes each
    assert machine.go(study(), tmp_path / "archives", minutes=1) == ["p1-seed-2"]  # at least one
    assert machine.go(study(), tmp_path / "archives", minutes=60) == ["p1-seed-3"]
    assert study() == []
    assert len(machine.ran) == 12
    archives = sorted((tmp_path / "archives").iterdir())
    assert len(load(archives).cells) == 12


def test_the_same_machine_continues_a_block_and_another_runs_it_whole_and_deletes_nothing(
    tmp_path: Path, study: Callable[[], list[Block]]
) -> None:
    folder = sweep_folder("synthetic", tmp_path / "runs")
    first = Machine(folder, "a", breaks_at=2)
    with pytest.raises(KeyboardInterrupt):
        first.go(study(), tmp_path / "archives", minutes=0)
    second = Machine(folder, "b")
    assert second.go(study(), tmp_path / "archives", minutes=0) == ["p1-seed-0"]
    assert len(second.ran) == 3
    aside = folder.path / "set-aside" / "p1-seed-0-1"
    assert {path.name for path in aside.iterdir()} == {cell.id for cell in first.ran}
    manifest = read_manifest(tmp_path / "archives" / "synthetic-p1-seed-0.tar.xz")
    assert len(manifest.cells) == 3
    broken = Machine(folder, "b", breaks_at=2)
    with pytest.raises(KeyboardInterrupt):
        broken.go(study(), tmp_path / "archives", minutes=0)
    again = Machine(folder, "b")
    assert again.go(study(), tmp_path / "archives", minutes=0) == ["p1-seed-1"]
    assert len(again.ran) == 1


def test_a_block_whose_machine_is_not_known_is_an_error_that_names_the_file(
    tmp_path: Path, study: Callable[[], list[Block]]
) -> None:
    folder = sweep_folder("synthetic", tmp_path / "runs")
    marker = folder.path / "blocks" / "p1-seed-0.json"
    marker.parent.mkdir(parents=True)
    marker.write_text("")
    with pytest.raises(StoreError, match=rf"{marker}: holds nothing, must hold one JSON object"):
        Machine(folder, "a").go(study(), tmp_path / "archives", minutes=0)
    marker.write_text('{"machine": "a"}\n')  # as older versions wrote it
    assert Machine(folder, "a").go(study(), tmp_path / "archives", minutes=0) == ["p1-seed-0"]
    assert [path.name for path in marker.parent.iterdir()] == [marker.name]


def test_a_block_of_which_a_cell_failed_is_not_archived(
    tmp_path: Path, study: Callable[[], list[Block]]
) -> None:
    machine = Machine(sweep_folder("synthetic", tmp_path / "runs"), "a")

    def run(cell: Cell) -> None:
        if cell.method == "sgd":
            attempt = machine.folder.stage(cell).new_attempt()
            write(attempt, cell, Run("sgd", 1, cell.seed, 3, 1.0, state="FAILED"))
        else:
            machine.run(cell)

    blocks = run_blocks(study(), machine.folder, tmp_path / "archives", 0, run, lambda: machine.now, "a")
    with pytest.raises(StoreError, match="1 of 3 cells of block p1-seed-0 did not complete, such as sgd-"):
        list(blocks)
    assert not (tmp_path / "archives").exists()


def test_a_changed_sweep_does_not_fit_its_archives(tmp_path: Path, study: Callable[[], list[Block]]) -> None:
    Machine(sweep_folder("synthetic", tmp_path / "runs"), "a").go(study(), tmp_path / "archives", minutes=0)
    changed = blocks_of([make_cell("sgd", 1, 0, Plan(), {"optimizer.lr": 0.7})])
    with pytest.raises(StoreError, match=r"synthetic-p1-seed-0\.tar\.xz lacks 1 of the block's 1 cells"):
        open_blocks(changed, tmp_path / "archives")


@pytest.mark.ranks
def test_the_command_runs_and_archives_each_block_once(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("KRONSCALE_LOCKS", str(tmp_path / "locks"))
    sweep = tmp_path / "one.yaml"
    sweep.write_text(
        "sweep: one\nworkload: digits\ntarget: {metric: accuracy, at_least: 0.5}\noptimizer: {lr: 0.1}\n"
        "training: {global_batch_size: 256, epochs: 1}\nmethods: [{name: sgd}]\nworld_size: 1\nrepeats: 2\n"
    )
    into = tmp_path / "archives"
    command = ["run", "-f", str(sweep), "--runs", str(tmp_path / "runs"), "--blocks", str(into)]
    assert main([*command, "--dry-run"]) == 0
    assert "one: 0 of 2 blocks archived" in capsys.readouterr().out
    assert main([*command, "--minutes", "0"]) == 0  # one block at least
    assert "blocks left: 1; repeat the command" in capsys.readouterr().out
    assert main(command) == 0
    assert main([*command, "--dry-run"]) == 0
    assert "one: 2 of 2 blocks archived" in capsys.readouterr().out
    study = load(sorted(into.iterdir()))
    assert list(study.cells["state"]) == ["COMPLETED", "COMPLETED"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "5"], "--minutes=5 has no effect without --blocks"),
        (["--blocks", "x", "--budget", "3"], "--budget=3 has no effect with --blocks"),
    ],
)
def test_options_without_an_effect_are_refused(words, message, tmp_path: Path, capsys) -> None:
    assert main(["run", "-f", "jobs/sweeps/demo.yaml", "--runs", str(tmp_path), *words]) == 2
    assert message in capsys.readouterr().err
