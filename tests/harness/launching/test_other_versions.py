"""Promise: a retry of cells that this version cannot read says in one line what can be done."""

import pytest

from harness.cli import main
from harness.launchers.ranks.outcome import outcome_without_ranks
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


def test_a_retry_of_cells_of_another_version_says_what_to_do(tmp_path, renamed, capsys):
    renamed().write_outcome(outcome_without_ranks("FAILED", "it was killed"))
    assert main(["retry", "study", "--runs", str(tmp_path), "--site", "local"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert errors[-1].startswith(
        "error: no cell of study can be started again by this version of Kronscale; retry"
    )
