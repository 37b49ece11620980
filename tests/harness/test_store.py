"""Promise: only what Kronscale wrote into the run folder is read, and other files there do no harm.

Folders without a cell cost one look-up each: 100,000 of them took `report` 21 s when each was listed.
"""

import sys
from collections import Counter

import pytest

from analysis.records.cache import fingerprint
from analysis.records.loading import load
from harness.cli import main
from harness.errors import StoreError
from harness.launchers.ranks.outcome import outcome_without_ranks
from harness.runs.checkpoint_store import CheckpointStore
from harness.runs.store import Attempt, CellFolder, SweepFolder, sweep_folder
from tests.harness.checkpoint.runs import cell


def test_copies_beside_attempts_and_checkpoints_are_ignored(tmp_path):
    folder = CellFolder(tmp_path)
    for name in (
        "attempt-1",
        "attempt-10",
        "attempt-2",
        "attempt-2.bak",
        "attempt-",
        "attempt-01",
        "attempt-old",
    ):
        (tmp_path / name).mkdir()
    assert [attempt.number for attempt in folder.attempts()] == [1, 2, 10]
    attempt = folder.latest()
    for name in ("step-00000120", "step-00000240", "step-00000240.bak", "step-x"):
        saved = attempt.path / "checkpoints" / name
        saved.mkdir(parents=True)
        (saved / "manifest.json").write_text("{}")
    assert [saved.step for saved in CheckpointStore(attempt).newest_first()] == [240, 120]
    assert folder.new_attempt() == Attempt(tmp_path / "attempt-11")


def test_a_cell_with_another_id_in_this_version_is_left_out_with_a_message(tmp_path, capsys):
    folder = sweep_folder("test", tmp_path)
    for method in ("sgd", "comm_opt"):
        folder.stage(cell(method, 1)).new_attempt().write_outcome(outcome_without_ranks("COMPLETED", ""))
    now = folder.cell_folder(cell("sgd", 1))
    then = CellFolder(folder.path / "sgd-p1-s0-0123456789")
    now.path.rename(then.path)
    with pytest.raises(
        StoreError, match=rf"0123456789: in this version its cell has the id {now.id}, so another"
    ):
        then.cell()
    assert [one.path for one in folder.cell_folders()] == [folder.cell_folder(cell("comm_opt", 1)).path]
    for command in ("status", "report"):
        assert main([command, "test", "--runs", str(tmp_path)]) == 0
        output = capsys.readouterr()
        assert output.err.startswith(f"left out: 1 stored cell; {then.path}: in this version its cell has ")
        assert command == "report" or "comm_opt" in output.out
    assert list(load(folder.path).cells["method"]) == ["comm_opt"]


EMPTY = 300
_seen: Counter[str] | None = None


def _count(event: str, arguments: tuple[object, ...]) -> None:
    if _seen is not None and event in ("os.listdir", "os.scandir"):
        _seen[str(arguments[0])] += 1


sys.addaudithook(_count)


@pytest.fixture
def runs(tmp_path):
    for number in range(EMPTY):
        (tmp_path / "runs" / "many" / f"sgd-p1-s{number}-{number:010x}").mkdir(parents=True)
    return tmp_path / "runs"


@pytest.mark.parametrize("command", ["fingerprint", "stored", "status", "status many"])
def test_a_folder_without_a_cell_is_not_listed(command, runs, monkeypatch, capsys):
    counted: Counter[str] = Counter()
    monkeypatch.setattr(sys.modules[__name__], "_seen", counted)
    if command == "fingerprint":
        fingerprint(runs / "many")
    elif command == "stored":
        assert not list(SweepFolder(runs / "many").stored())
    else:
        assert main([*command.split(), "--runs", str(runs)]) == 0
    monkeypatch.setattr(sys.modules[__name__], "_seen", None)
    assert 0 < counted[str(runs / "many")] <= 5
    assert not [path for path in counted if path.startswith(f"{runs / 'many'}/")]
    capsys.readouterr()
