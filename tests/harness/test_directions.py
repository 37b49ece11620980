"""Promise: limits are on the right side, the newest is tried first, and what is written is on the disk."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from harness.cell import Target
from harness.errors import SiteError
from harness.launchers.local.host_locks import lock_folder
from harness.runs.checkpoint_store import CheckpointStore, Manifest, Saved, resumable
from harness.runs.record_lines import RecordWriter
from harness.runs.records import FailureRecord
from harness.runs.stored_files import write_atomically, write_once
from harness.study.filters import select
from harness.training import train, training_state
from tests.harness.test_train import cell


def test_a_value_at_the_target_reaches_it():
    assert Target(metric="accuracy", at_least=0.95).reached_by(0.95)
    assert Target(metric="loss", at_most=0.5).reached_by(0.5)
    assert not Target(metric="accuracy", at_least=0.95).reached_by(0.9499)
    assert not Target(metric="loss", at_most=0.5).reached_by(float("nan"))


@pytest.mark.parametrize(
    ("where", "seeds"),
    [
        ("seed<2", [0, 1]),
        ("seed<=2", [0, 1, 2]),
        ("seed>2", [3]),
        ("seed>=2", [2, 3]),
        ("seed!=2", [0, 1, 3]),
    ],
)
def test_where_keeps_or_drops_the_limit_itself(where, seeds):
    assert [one.seed for one in select([cell(seed=seed) for seed in range(4)], where)] == seeds


@pytest.mark.parametrize("mode", [0o770, 0o700, 0o777, 0o1770])
def test_a_lock_folder_that_not_all_users_share_is_refused(mode, tmp_path, monkeypatch):
    monkeypatch.setenv("KRONSCALE_LOCKS", str(tmp_path / "locks"))
    folder = lock_folder()
    folder.chmod(mode)
    with pytest.raises(SiteError, match=f"mode {mode:04o}"):
        lock_folder()
    folder.chmod(0o1777)
    assert lock_folder() == folder


def test_a_record_is_with_the_system_when_write_returns(tmp_path):
    path = tmp_path / "rank-00000.jsonl"
    with RecordWriter(path) as writer:
        writer.write(FailureRecord(0, 1, "forward", "ValueError", "no", ""))
        assert path.read_text(encoding="utf-8").count("\n") == 1  # a kill now would lose nothing


@pytest.mark.parametrize("write", [write_atomically, write_once])
def test_content_is_on_the_disk_before_it_has_its_name(write, tmp_path, monkeypatch):
    synced = []

    def fsync(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_size, (tmp_path / "outcome.json").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    write(tmp_path / "outcome.json", "content")
    assert (len("content"), False) in synced


def manifest(step: int) -> Manifest:
    return Manifest(version=1, step=step, world_size=1, segment=0, reason="steps", saved_at=0.0, parts={})


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    store = CheckpointStore(SimpleNamespace(path=tmp_path))
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(store.saved(3).path.exists()))
    store.begin(3)
    store.publish(3, manifest(3))
    assert synced[0] is False
    assert synced[-1] is True  # the folder that holds its name


def test_a_retry_tries_the_newest_checkpoint_first(tmp_path):
    older, newer = tmp_path / "attempt-1", tmp_path / "attempt-2"
    for folder, steps in ((older, (10, 20)), (newer, (30, 40))):
        for step in steps:
            folder.mkdir(exist_ok=True)
            store = CheckpointStore(SimpleNamespace(path=folder))
            store.begin(step)
            store.publish(step, manifest(step))
    attempts = [SimpleNamespace(path=folder) for folder in (newer, older)]
    last = SimpleNamespace(path=newer, lineage=lambda: attempts)
    assert [saved.step for _, saved in resumable(last)] == [40, 30, 20, 10]
    assert isinstance(resumable(last)[0][1], Saved)


def test_clocks_continue_where_the_segment_before_ended(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(training_state.time, "perf_counter", lambda: now[0])
    own = training_state.RunClocks(SimpleNamespace(elapsed_seconds=2.0))
    own.restore(
        {"train_seconds": 5.0, "eval_seconds": 1.0, "checkpoint_seconds": 3.0, "earlier_wall_seconds": 9.0}
    )
    with own.checkpoint():
        now[0] += 4.0
    assert own.state() == {
        "train_seconds": 7.0, "eval_seconds": 1.0, "checkpoint_seconds": 7.0, "earlier_wall_seconds": 13.0,
    }  # fmt: skip


def test_a_clock_is_that_of_the_slowest_rank():
    trainer = SimpleNamespace(world=SimpleNamespace(all_gather=lambda _: [3.0, 5.0, 4.0]))
    assert train.Trainer._slowest(trainer, 3.0) == 5.0


def test_with_a_local_batch_the_global_batch_grows_with_the_ranks():
    weak = cell(training={"local_batch_size": 64, "epochs": 1}).training
    strong = cell(training={"global_batch_size": 64, "epochs": 1}).training
    assert (weak.batch_sizes(4), strong.batch_sizes(4)) == ((256, 64), (64, 16))
