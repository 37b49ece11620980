"""Promise: no command acts on more than was meant: nothing repeated, empty or without effect is accepted."""

from pathlib import Path

import pytest

from harness.cli import main
from harness.runs.attempt_outcome import Outcome
from harness.runs.store import sweep_folder
from harness.study.status import stored_statuses
from harness.study.sweep import read_sweep

DEMO = "jobs/sweeps/demo.yaml"
SWEEP = """\
sweep: s
workload: digits
target: {metric: accuracy, at_least: 0.9}
training: {global_batch_size: 128, epochs: 2}
optimizer: {lr: 0.1}
methods:
  - {name: sgd}
  - {name: k, kfac: {}}
"""


@pytest.fixture
def sweep(tmp_path):
    """Write a sweep with these lines more; returns its path."""

    def write(more: str) -> Path:
        path = tmp_path / "s.yaml"
        path.write_text(SWEEP + more)
        return path

    return write


@pytest.fixture
def cli(tmp_path, capsys):
    def call(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments, "--runs", str(tmp_path / "runs")])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


@pytest.fixture
def stored(tmp_path):
    """Two sweeps with runs: the demo's first two cells, and one cell of another sweep."""
    cells = read_sweep(Path(DEMO)).cells[:2]
    cells.append(cells[0].model_copy(update={"sweep": "other"}))
    for cell in cells:
        attempt = sweep_folder(cell.sweep, tmp_path / "runs").stage(cell).new_attempt()
        attempt.write_outcome(Outcome("FAILED", "it broke", None, "error", 1.0, 2.0))
    return cells


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "-f", DEMO, "-f", DEMO], "--file is given 2 times; give it once"),
        (["submit", "-f", DEMO, "--budget", "1", "--budget", "100"], "--budget is given 2 times"),
        (["plan", "-f", DEMO, "--set", ""], "--set is empty"),
        (["retry", "demo", "--where", "seed=0", "--where", " "], "--where is empty"),
        (["cancel", ""], "SWEEP is empty"),
        (["logs", ""], "CELL is empty"),
        (["plan", "-f", DEMO, "--set", "training.epochs="], f"{DEMO}: --set training.epochs= has no value"),
        (
            ["plan", "-f", DEMO, "--set", "training.epochs=1", "--set", "training.epochs=2"],
            f"{DEMO}: --set training.epochs sets training.epochs a second time",
        ),
        (
            ["plan", "-f", DEMO, "--set", "training={epochs: 1}", "--set", "training.epochs=2"],
            f"{DEMO}: --set training.epochs sets training.epochs a second time",
        ),
        (
            ["plan", "-f", DEMO, "--set", "repeats=1", "--set", "seeds=[4]"],
            f"{DEMO}: --set seeds and --set repeats are both given",
        ),
    ],
)
def test_what_is_repeated_or_empty_is_refused(arguments, message, stored, cli):
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


def test_every_where_must_hold(cli, tmp_path):
    for order in (("method=sgd", "seed=1"), ("seed=1", "method=sgd")):
        both = [word for one in order for word in ("--where", one)]
        code, out, _ = cli("plan", "-f", DEMO, *both, "--all")
        cells = [line.split()[1] for line in out.splitlines() if line.startswith("new ")]
        assert code == 0
        assert [cell.split("-")[:3] for cell in cells] == [["sgd", f"p{size}", "s1"] for size in (1, 2)]


@pytest.mark.parametrize(
    "entry",
    [
        "world_size: true", "seed: null", "workload.options.hidden: null", "training.stop_at_target: 1",
    ],
)  # fmt: skip
def test_exclude_takes_no_value_of_another_type_for_an_equal_one(entry, sweep, cli):
    path = sweep(f"grid: {{world_size: [1, 2]}}\nrepeats: 2\nexclude: [{{{entry}}}]\n")
    code, _, err = cli("plan", "-f", str(path))
    assert (code, "exclude[0] matches no cell" in err) == (2, True), err


def test_exclude_matches_null_numbers_and_schedules_by_their_value(sweep):
    """Null is not what has no such section; a whole number equals the same number with a point."""
    more = "world_size: 1\nrepeats: 1\ngrid: {kfac.kl_clip: [null, 0.01]}\nexclude: [{kfac.kl_clip: null}]\n"
    cells = read_sweep(sweep(more)).cells
    assert [(cell.method, cell.kfac and cell.kfac.kl_clip) for cell in cells] == [("sgd", None), ("k", 0.01)]
    more = (
        "world_size: 1\nrepeats: 1\ngrid: {optimizer.lr: [1.0, 2.0], "
        "kfac.damping: [0.1, {initial: 0.1, factor: 0.5, at: [1]}]}\n"
        "exclude: [{optimizer.lr: 1}, {kfac.damping: {initial: 0.1, factor: 0.5, at: [1]}}]\n"
    )
    cells = read_sweep(sweep(more)).cells
    assert [(cell.method, cell.optimizer.lr) for cell in cells] == [("sgd", 2.0), ("k", 2.0)]
    assert cells[1].kfac.damping == 0.1


def test_a_sweep_that_cannot_be_read_does_not_hide_the_others(stored, cli, tmp_path, monkeypatch):
    unreadable = tmp_path / "runs" / "other"

    def refuse(folder, cells):
        if folder.path == unreadable:
            raise PermissionError(13, "Permission denied", str(unreadable))
        return stored_statuses(folder, cells)

    monkeypatch.setattr("harness.cli.sweep_statuses.stored_statuses", refuse)
    code, out, err = cli("status")
    assert code == 2
    assert out.startswith("demo: 2 FAILED")
    assert err == f"error: sweep other cannot be read: {unreadable}: Permission denied\n"
    code, out, err = cli("status", "--json")
    assert (code, out.count('"id"'), err.count("\n")) == (2, 2, 1)
    assert cli("status", "demo")[0] == 0


def test_a_filter_over_all_sweeps_shows_those_with_a_match(stored, cli):
    code, out, _ = cli("status", "--where", f"id=other/{stored[2].id}")
    assert (code, out.startswith("other: 1 FAILED")) == (0, True)
    assert "demo" not in out
    assert cli("status", "--where", "method=none")[0] == 2


def test_sweep_and_cell_are_accepted_wherever_a_cell_is(stored, cli):
    name = f"other/{stored[2].id}"
    assert cli("status", name)[1].startswith("other: 1 FAILED")
    assert cli("status", "demo/sgd-p1-s0")[1].startswith("demo: 1 FAILED")
    assert cli("cancel", name)[1] == "nothing to cancel: no cell is pending or running\n"
    assert cli("plan", "-f", DEMO, "--where", f"id=demo/{stored[1].id}")[1].count(stored[1].id) == 1
    code, _, err = cli("logs", f"other/{stored[2].id[:8]}")
    assert (code, "does not exist: the attempt is FAILED it broke" in err) == (2, True)
    assert "2 cells have ids that begin with" in cli("logs", stored[0].id)[2]
    for command in ("status", "logs"):
        code, _, err = cli(command, "demo/nothing")
        assert (code, "no cell in" in err) == (2, True)


@pytest.mark.parametrize(
    ("command", "name"),
    [("report", "demo/../../x"), ("status", "/etc"), ("cancel", ".."), ("retry", "."), ("logs", "../runs")],
)
def test_names_are_no_paths_out_of_the_runs(command, name, stored, cli, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    code, out, err = cli(command, name)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert sorted(tmp_path.rglob("*")) == before


def test_comparing_folders_elsewhere_writes_nothing_there(stored, cli, tmp_path):
    elsewhere = tmp_path / "kept" / "deep" / "demo"
    elsewhere.parent.mkdir(parents=True)
    (tmp_path / "runs" / "demo").rename(elsewhere)
    before = sorted((tmp_path / "kept").rglob("*"))
    cli("compare", str(elsewhere), str(elsewhere))
    assert sorted((tmp_path / "kept").rglob("*")) == before
    code, _, err = cli("compare", str(tmp_path / "kept"), "other")
    assert (code, f"{tmp_path / 'kept'} holds no cells" in err) == (2, True)
    assert not (tmp_path / "derived" / "kept").exists()
