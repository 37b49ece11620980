"""Promise: an attempt continues the attempt that it was made from, and no other with the same number."""

import shutil

import pytest

from harness.errors import StoredFileError
from harness.launchers.launch import Launch
from harness.launchers.local import LocalLauncher
from harness.launchers.ranks.outcome import outcome_without_ranks
from harness.runs.checkpoint_store import FORMAT_VERSION, CheckpointStore, Manifest
from harness.runs.store import sweep_folder
from harness.study.submit import retry, submit


@pytest.fixture
def resumed(tmp_path, make_cell, site, monkeypatch):
    """A cell's folder with a failed attempt that saved a checkpoint, and the attempt that continues it."""
    monkeypatch.setattr(LocalLauncher, "resume", lambda *_, **__: None)

    def make(name):
        root = tmp_path / name
        submit([make_cell()], site, root)
        folder = sweep_folder("study", root).cell_folder(make_cell())
        store = CheckpointStore(folder.latest())
        store.begin(7)
        store.publish(7, Manifest(FORMAT_VERSION, 7, 1, 0, "interval", 1.0, {}))
        folder.latest().write_outcome(outcome_without_ranks("FAILED", "killed"))
        retry([make_cell()], site, root)
        return folder

    return make


def test_attempts_have_identities_and_name_the_one_that_they_continue(resumed):
    first, second = (Launch.read(attempt) for attempt in resumed("here").attempts())
    assert first.continues_id is None
    assert (second.continues, second.continues_id) == (1, first.id)
    assert len({first.id, second.id, None}) == 3


def test_an_attempt_that_was_copied_beside_another_run_does_not_join_it(resumed):
    here, there = resumed("here"), resumed("there")
    assert [one.number for one in here.latest().lineage()] == [2, 1]
    shutil.rmtree(here.path / "attempt-2")
    shutil.copytree(there.path / "attempt-2", here.path / "attempt-2")
    with pytest.raises(
        StoredFileError, match=r"attempt-2/launch.json: continues=1 .* copied into each other"
    ):
        here.latest().lineage()


def test_attempts_of_older_versions_are_joined_by_their_numbers(resumed):
    folder = resumed("here")
    for attempt in folder.attempts():
        launch = attempt.read("launch.json")
        attempt.write(
            "launch.json", {name: launch[name] for name in launch if name not in ("id", "continues_id")}
        )
    assert [one.number for one in folder.latest().lineage()] == [2, 1]
