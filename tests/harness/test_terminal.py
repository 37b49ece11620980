"""Promise: ids can be copied from any output; colours and bars are for terminals; long work shows its end."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from harness.cli import main
from harness.runs.attempt_outcome import Outcome
from harness.runs.store import sweep_folder
from harness.study.progress import follow, left_seconds
from harness.study.status import CellStatus
from harness.study.sweep import read_sweep

DEMO = "jobs/sweeps/demo.yaml"
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]m")


@pytest.fixture
def stored(tmp_path):
    """The demo's first cells: a completed one, one that failed for a long reason, a pending one."""
    cells = read_sweep(Path(DEMO)).cells[:3]
    long = "rank 0 exited with code 3: " + "no such file or directory " * 12
    outcomes = [
        Outcome("COMPLETED", "", True, "target", 1.0, 2.0),
        Outcome("FAILED", long, None, "error", 1.0, 2.0),
    ]
    for cell, outcome in zip(cells, [*outcomes, None], strict=True):
        attempt = sweep_folder("demo", tmp_path).stage(cell).new_attempt()
        if outcome is not None:
            attempt.write_outcome(outcome)
    return cells


@pytest.mark.parametrize("columns", [None, "20", "60", "400"])
def test_status_has_one_line_a_cell_with_its_whole_id_first(columns, stored, tmp_path, monkeypatch, capsys):
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    assert main(["status", "demo", "--runs", str(tmp_path)]) == 0
    title, heading, *lines = capsys.readouterr().out.splitlines()
    assert title == "demo: 1 COMPLETED, 1 FAILED, 1 STAGED"
    assert heading.split() == ["state", "cell", "step", "phase", "metric", "elapsed", "cause"]
    assert [line.split()[:2] for line in lines] == [
        ["FAILED", stored[1].id], ["STAGED", stored[2].id], ["COMPLETED", stored[0].id],
    ]  # fmt: skip
    assert lines[0].count("no such file") == 12


@pytest.mark.parametrize("command", [["status", "demo"], ["plan", "-f", DEMO]])
def test_states_are_coloured_in_terminals_alone(command, stored, tmp_path, monkeypatch, capsys):
    arguments = [*command, "--runs", str(tmp_path)]
    assert main(arguments) == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    monkeypatch.setenv("TERM", "xterm")
    assert main(arguments) == 0
    coloured = capsys.readouterr().out
    assert COLOUR.search(coloured)
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(arguments) == 0
    assert not COLOUR.search(capsys.readouterr().out)


def _status(cell, state, seconds=None):
    now = 1000.0
    times = {} if seconds is None else {"started_at": now - seconds, "ended_at": now}
    return CellStatus(cell, state, **times)


def test_the_time_left_is_that_of_the_completed_cells_of_the_same_method_and_world_size():
    cells = read_sweep(Path(DEMO)).cells
    one, two = (next(cell for cell in cells if cell.world_size == size) for size in (1, 2))
    done = [_status(one, "COMPLETED", 10.0), _status(one, "COMPLETED", 20.0), _status(two, "COMPLETED", 40.0)]
    assert left_seconds([_status(one, "PENDING")]) is None
    assert left_seconds(done) == 0.0
    assert left_seconds([*done, _status(one, "PENDING"), _status(two, "PENDING")]) == 15.0 + 40.0
    assert left_seconds([*done, _status(one, "RUNNING", 5.0), _status(two, "RUNNING", 100.0)]) == 10.0 / 2
    other = next(cell for cell in cells if cell.method != one.method)
    assert left_seconds([*done, _status(other, "PENDING")]) == pytest.approx(70 / 3)


@pytest.mark.parametrize("terminal", [True, False])
def test_following_shows_the_time_left(terminal):
    cell = read_sweep(Path(DEMO)).cells[0]
    done, pending = _status(cell, "COMPLETED", 65.0), _status(cell, "PENDING")
    reads = iter([[done, pending], [done, done]])
    file = io.StringIO()
    follow(lambda: next(reads), Console(file=file, force_terminal=terminal, width=100))
    assert "1 COMPLETED, 1 PENDING; about 1m05s left" in file.getvalue()
    assert ("\x1b" in file.getvalue()) == terminal
    assert ("1/2" in file.getvalue()) == terminal
