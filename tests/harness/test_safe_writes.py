"""Promise: files appear whole, with the permissions of their folder, and outlive a crash."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from harness.errors import SiteError
from harness.launchers.local.host_locks import lock_folder
from harness.runs.checkpoint_store import CheckpointStore, Request
from harness.runs.record_lines import RecordWriter
from harness.runs.records import FailureRecord
from harness.runs.stored_files import make_inside, write_atomically, write_once
from harness.training.checkpoint import Checkpoints, Schedule
from harness.training.checkpoint.parts import DamagedError, read_part, write_part
from tests.harness.test_directions import manifest


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_who_reads_the_old_file_reads_it_to_its_end(tmp_path):
    path = tmp_path / "launch.json"
    write_atomically(path, "old")
    with path.open() as reader:
        write_atomically(path, "new")
        assert reader.read() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_first_of_two_writers_wins_though_neither_saw_the_other(tmp_path, monkeypatch):
    path = tmp_path / "outcome.json"
    assert write_once(path, "first")
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert not write_once(path, "second")
    monkeypatch.undo()
    assert path.read_text() == "first"


@pytest.mark.parametrize(("folder", "file"), [(0o700, 0o600), (0o750, 0o640), (0o2750, 0o640)])
def test_files_and_folders_have_the_permissions_of_the_folder_around_them(folder, file, tmp_path):
    tmp_path.chmod(folder)
    write_atomically(tmp_path / "launch.json", "")
    write_atomically(tmp_path / "secret", "", private=True)
    make_inside(tmp_path / "attempt-1")
    assert mode(tmp_path / "launch.json") == file
    assert mode(tmp_path / "secret") == 0o600
    assert mode(tmp_path / "attempt-1") == folder


def test_what_others_may_write_is_not_passed_on(tmp_path):
    tmp_path.chmod(0o777)
    make_inside(tmp_path / "attempt-1")
    assert mode(tmp_path / "attempt-1") == 0o750


def test_a_lock_folder_behind_a_link_is_refused(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere").chmod(0o1777)
    (tmp_path / "locks").symlink_to("elsewhere")
    monkeypatch.setenv("KRONSCALE_LOCKS", str(tmp_path / "locks"))
    with pytest.raises(SiteError, match="must be a folder with mode 1777"):
        lock_folder()


def test_a_line_that_a_killed_rank_left_unfinished_is_ended_first(tmp_path):
    path = tmp_path / "rank-00000.jsonl"
    path.write_bytes(b'{"schema": 5, "ki')
    with RecordWriter(path) as writer:
        writer.write(FailureRecord(0, 1, "forward", "ValueError", "no", ""))
    assert path.read_bytes().startswith(b'{"schema": 5, "ki\n{"schema": 6, "kind": "failure"')


@pytest.fixture
def synced(monkeypatch):
    """What was synced: whether it is a file, with its size."""
    found = []

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        found.append((stat.S_ISREG(status.st_mode), status.st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    return found


def test_two_checkpoints_are_kept_and_their_manifests_are_synced(tmp_path, synced):
    store = CheckpointStore(SimpleNamespace(path=tmp_path))
    for step in (10, 20, 30):
        store.begin(step)
        store.publish(step, manifest(step))
    assert [saved.step for saved in store.newest_first()] == [30, 20]
    size = (store.saved(30).path / "manifest.json").stat().st_size
    assert (True, size) in synced
    store.begin(40)
    assert [saved.step for saved in store.newest_first()] == [30, 20]  # one that is not complete is none


def test_a_part_is_synced_and_is_read_only_as_it_was_written(tmp_path, synced):
    path = tmp_path / "part.pt"
    summed = write_part(path, {"a": torch.arange(4.0)})
    assert synced == [(True, path.stat().st_size)]
    assert torch.equal(read_part(path, summed)["a"], torch.arange(4.0))
    content = bytearray(path.read_bytes())
    content[content.index(torch.arange(4.0).numpy().tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedError, match="with checksum"):
        read_part(path, summed)


class FullOnce(io.BytesIO):
    """A file on a disk that is full at the first write."""

    full = True

    def write(self, data):
        if self.full:
            self.full = False
            raise OSError(28, "No space left on device")
        return super().write(data)

    def fileno(self):
        return 0


def test_a_part_that_lacks_a_piece_is_not_saved(synced):
    with pytest.raises(OSError, match="No space left"):
        write_part(SimpleNamespace(open=lambda mode: FullOnce()), {"a": torch.arange(4.0)})


def test_checkpoints_in_epochs_are_at_their_first_step_and_not_where_the_run_resumed():
    checkpoints = Checkpoints.__new__(Checkpoints)
    checkpoints._agreement = SimpleNamespace(request_at=lambda step: None)
    checkpoints._schedule, checkpoints._first_step = Schedule(every_epochs=2), 10
    asked = {step: checkpoints.request(step, step // 5, step % 5) for step in range(5, 31)}
    due = Request("interval", stops=False)
    assert {step: request for step, request in asked.items() if request} == {20: due, 30: due}
