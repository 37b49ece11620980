"""Promise: cells of another version can be cancelled, and a retry says in one line what can be done."""

import pytest

from harness.cli import main
from harness.launchers.launch import RanksStarted
from harness.launchers.outcome import outcome_without_ranks
from harness.runs.store import CellFolder


@pytest.fixture
def renamed(make_attempt, make_cell):
    """A pending attempt at a cell that has another id in this version."""

    def make(**cell):
        attempt = make_attempt(make_cell(**cell))
        then = attempt.path.parent.with_name(f"sgd-p1-s{cell.get('seed', 0)}-0123456789")
        attempt.path.parent.rename(then)
        return CellFolder(then).latest()

    return make


def test_a_pending_cell_of_another_version_is_cancelled(tmp_path, renamed, make_attempt, make_cell, capsys):
    then = renamed()
    assert main(["cancel", "study", "--runs", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.out == "1 cell cancelled\n"
    assert "left out: 1 stored cell; " in printed.err
    assert (then.outcome().state, then.outcome().cause) == ("CANCELLED", "cancelled before it started")
    assert main(["cancel", "study", "--runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "nothing to cancel: no cell is pending or running\n"

    then, now = renamed(seed=1), make_attempt(make_cell(seed=2))
    assert main(["cancel", "study", "--runs", str(tmp_path), "--where", "seed=2"]) == 0
    assert (then.outcome(), now.outcome().state) == (None, "CANCELLED")
    assert main(["cancel", "study", "--runs", str(tmp_path)]) == 0
    assert then.outcome().state == "CANCELLED"


@pytest.mark.parametrize("change", [{"launcher": "of-tomorrow"}, {"launcher": 7}])
def test_a_running_cell_with_a_launcher_that_is_not_known_is_requested_to_end(
    tmp_path, renamed, capsys, change
):
    then = renamed()
    RanksStarted(1.0, (0,), ()).write(then)
    then.write("launch.json", then.read("launch.json") | change)
    assert main(["cancel", "study", "--runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "1 cell cancelled\n"
    assert (then.path / "cancel").exists()


def test_a_retry_of_cells_of_another_version_says_what_to_do(tmp_path, renamed, capsys):
    renamed().write_outcome(outcome_without_ranks("FAILED", "it was killed"))
    assert main(["retry", "study", "--runs", str(tmp_path), "--site", "local"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith(
        "error: no cell of study can be started again by this version of Kronscale; retry"
    )
