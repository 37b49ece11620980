"""Promise: whatever happens to a checkpoint, the run resumes from the newest intact one."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import subprocess
from dataclasses import asdict, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from harness.runs.checkpoint_store import CheckpointStore
from harness.runs.records import CheckpointRecord, SegmentRecord
from harness.runs.stored_files import with_checksum, write_atomically
from harness.training.checkpoint import Schedule, parts
from harness.training.world import World
from tests.harness.checkpoint.runs import cell, new_attempt, train
from tests.kfac_core.worlds import rank_context

EVERY_EPOCH = Schedule(every_epochs=1)


@pytest.fixture(scope="module")
def uninterrupted(world, tmp_path_factory):
    """What every rank of an uninterrupted run leaves, trained once per cell."""

    @cache
    def bits(method, world_size):
        spec = cell(method, world_size)
        attempt = new_attempt(tmp_path_factory.mktemp("whole"), spec)
        return [run.bits for run in world(world_size).run(train, spec, attempt)]

    return bits


def records_of(run, kind):
    return [record for record in run.records if isinstance(record, kind)]


@pytest.fixture
def small_disk(tmp_path):
    """Mount a disk of so many kilobytes at a folder."""
    mounted = []

    def mount(folder: Path, kilobytes: int):
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a full disk needs the right to mount one: {done.stderr.strip()}")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_loses_the_checkpoint_but_neither_the_run_nor_the_previous_one(
    world, tmp_path, small_disk, uninterrupted
):
    ranks, spec = world(2), cell("comm_opt", 2)
    attempt = new_attempt(tmp_path / "full", spec)
    ranks.run(partial(train, stop_before=3), spec, attempt)
    size = sum(file.stat().st_size for file in attempt.path.glob("checkpoints/*/*")) // 1024
    (attempt.path / "checkpoints").rename(attempt.path / "kept")
    small_disk(attempt.path / "checkpoints", 4 * (1 + (3 * size // 2 + 16) // 4))  # for one and a half
    shutil.copytree(
        attempt.path / "kept" / "step-00000003", CheckpointStore(attempt).folder / "step-00000003"
    )

    full = ranks.run(partial(train, schedule=EVERY_EPOCH, stop_before=13), spec, attempt)
    errors = [(record.step, record.error) for record in records_of(full[0], CheckpointRecord)]
    assert [step for step, _ in errors] == [5, 10, 13]
    assert all("No space left on device" in error for _, error in errors)
    assert full[0].result.stop_reason == "preempted"
    assert [path.name for path in CheckpointStore(attempt).folder.iterdir()] == ["step-00000003"]

    resumed = ranks.run(train, spec, attempt)
    for rank in range(2):
        assert resumed[rank].bits == uninterrupted("comm_opt", 2)[rank]
        assert records_of(resumed[rank], SegmentRecord)[0].first_step == 3


def flip(path: Path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGE = {
    "a bit of rank 1's part": lambda folder: flip(folder / "rank-00001.pt"),
    "the shared part truncated": lambda folder: os.truncate(folder / "shared.pt", 1000),
    "a part missing": lambda folder: (folder / "rank-00000.pt").unlink(),
    "the manifest": lambda folder: (folder / "manifest.json").write_text('{"version": 1, '),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_reported(world, tmp_path, damage, uninterrupted):
    ranks, spec = world(2), cell("mem_opt", 2)
    attempt = new_attempt(tmp_path / "cut", spec)
    ranks.run(partial(train, schedule=EVERY_EPOCH, stop_before=13), spec, attempt)
    newest, before = CheckpointStore(attempt).newest_first()
    assert (newest.step, before.step) == (13, 10)
    DAMAGE[damage](newest.path)
    resumed = ranks.run(partial(train, stop_before=13), spec, attempt)
    for run in resumed:
        (segment,) = records_of(run, SegmentRecord)
        assert segment.first_step == 10
        assert "checkpoint of step 13 in attempt-1 is damaged for ranks" in segment.notes[0]
    assert attempt.read("segment.json")["notes"] == list(records_of(resumed[0], SegmentRecord)[0].notes)
    again = ranks.run(train, spec, attempt)  # the damaged one was replaced
    assert records_of(again[0], SegmentRecord)[0].first_step == 13
    assert [run.bits for run in again] == uninterrupted("mem_opt", 2)


def test_a_run_with_damaged_checkpoints_only_starts_anew(world, tmp_path):
    spec = cell("sgd", 1)
    attempt = new_attempt(tmp_path, spec)
    world(1).run(partial(train, stop_before=13), spec, attempt)
    flip(CheckpointStore(attempt).newest_first()[0].path / "shared.pt")
    ((run),) = world(1).run(train, spec, attempt)
    (segment,) = records_of(run, SegmentRecord)
    assert (segment.segment, segment.first_step, segment.attempt) == (1, 0, None)
    assert len(segment.notes) == 1


def test_a_checkpoint_of_another_format_or_world_or_without_a_part_counts_as_damaged(tmp_path):
    spec = cell("sgd", 1)
    attempt = new_attempt(tmp_path, spec)
    train(0, 1, spec, attempt, stop_before=3)
    (saved,) = CheckpointStore(attempt).newest_first()
    manifest = saved.manifest()
    for change in ({"version": 2}, {"world_size": 4}, {"parts": {}}):
        write_atomically(saved.path / "manifest.json", with_checksum(asdict(replace(manifest, **change))))
        loaded, (note,) = parts.load_newest(attempt, World(0, 1, torch.device("cpu"), "gloo"))
        assert loaded is None
        assert "damaged for ranks 0 and passed over: its manifest" in note


def test_a_checkpoint_that_would_run_code_counts_as_damaged(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "hacked"),)

    summed = parts.write_part(tmp_path / "part.pt", {"a": Evil()})
    with pytest.raises(parts.DamagedError, match=r"part\.pt"):
        parts.read_part(tmp_path / "part.pt", summed)
    assert not (tmp_path / "hacked").exists()


KILL_POINTS = {
    "after a part": (parts, "write_part", "after"),
    "before the manifest": (CheckpointStore, "publish", "before"),
    "after the manifest, before the rename": (Path, "rename", "before"),
    "after the rename, before old ones are removed": (Path, "rename", "after"),
}


def die_at(name, attempt, spec):
    """Save at every epoch, and kill this process the third time that it reaches the kill point."""
    owner, function, when = KILL_POINTS[name]
    real = getattr(owner, function)
    calls = [0]

    def deadly(*args, **kwargs):
        calls[0] += 1
        third = calls[0] == (5 if function == "write_part" else 3)  # two parts a checkpoint
        if third and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        returned = real(*args, **kwargs)
        if third:
            os.kill(os.getpid(), signal.SIGKILL)
        return returned

    setattr(owner, function, deadly)
    train(0, 1, spec, attempt, EVERY_EPOCH)


@pytest.mark.parametrize("name", KILL_POINTS)
def test_sigkill_while_saving_leaves_an_intact_checkpoint(world, tmp_path, name, uninterrupted):
    spec = cell("comm_opt", 1)
    attempt = new_attempt(tmp_path / "killed", spec)
    import_module("torch._dynamo")  # which an optimizer imports: once here, not in every fork
    process = multiprocessing.get_context("fork").Process(target=die_at, args=(name, attempt, spec))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    ((resumed),) = world(1).run(train, spec, attempt)
    (segment,) = records_of(resumed, SegmentRecord)
    assert segment.first_step == (15 if name == "after the rename, before old ones are removed" else 10)
    assert segment.notes == ()
    assert [resumed.bits] == uninterrupted("comm_opt", 1)


def die_while_others_save(rank, folder, attempt, spec):
    torch.set_num_threads(1)  # as in the worlds of the tests: another number of threads gives other bits
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    if rank == 1:
        real = parts.write_part

        def deadly(path, content):
            if "step-00000010" in str(path):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(path, content)

        parts.write_part = deadly
    try:
        train(rank, 2, spec, attempt, EVERY_EPOCH)
    finally:
        os._exit(1)  # as a worker does: the process group would wait for the dead rank


def test_a_rank_that_dies_while_others_save_loses_only_that_checkpoint(world, tmp_path, uninterrupted):
    spec = cell("mem_opt", 2)
    attempt = new_attempt(tmp_path / "killed", spec)
    arguments, context = (str(tmp_path), attempt, spec), rank_context("harness.training.train")
    ranks = [context.Process(target=die_while_others_save, args=(rank, *arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(120)
    assert [process.exitcode for process in ranks] == [1, -signal.SIGKILL]
    assert [saved.step for saved in CheckpointStore(attempt).newest_first()] == [5]
    resumed = world(2).run(train, spec, attempt)
    assert records_of(resumed[0], SegmentRecord)[0].first_step == 5
    assert [run.bits for run in resumed] == uninterrupted("mem_opt", 2)
