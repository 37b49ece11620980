"""Promise: collecting runs of several machines loses none, counts none twice and changes none."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.records.left_out import LeftOutWarning
from analysis.records.tables import load
from harness.cli import main
from harness.errors import StoredFileError
from harness.runs.collected import Collected
from harness.runs.collection import copying
from harness.runs.store import Attempt, CellFolder, SweepFolder
from harness.study.status import read_statuses
from harness.study.submit import cancel
from tests.analysis.conftest import Plan, make_cell
from tests.analysis.hand_made import Run, write

FIRST = Run("sgd", 1, 0, 3, 1.0, launch={"id": "a1"})


class Machine:
    """A folder of runs."""

    def __init__(self, folder: Path) -> None:
        self.runs = folder / "runs"

    @property
    def sweep(self) -> SweepFolder:
        return SweepFolder(self.runs / "synthetic")

    def cell(self, run: Run = FIRST) -> CellFolder:
        return self.sweep.cell_folder(make_cell(run.method, run.world_size, run.seed, Plan(), run.patch))

    def run(self, run: Run = FIRST, *, ended: bool = True) -> Attempt:
        """An attempt with logs; without `ended` one that runs."""
        cell = make_cell(run.method, run.world_size, run.seed, Plan(), run.patch)
        attempt = self.sweep.stage(cell).new_attempt()
        write(attempt, cell, run)
        attempt.write("begun.json", {"started_at": 1.0, "cpus": [0], "gpus": []})
        attempt.log(0).write_text("a line\n")
        if not ended:
            (attempt.path / "outcome.json").rename(attempt.path.parent / ".outcome")
            whole = attempt.records(0).read_bytes()
            (attempt.path.parent / ".records").write_bytes(whole)
            attempt.records(0).write_bytes(whole[: len(whole) // 2])
        return attempt

    def end(self, attempt: Attempt) -> None:
        """End an attempt that runs."""
        (attempt.path.parent / ".records").rename(attempt.records(0))
        (attempt.path.parent / ".outcome").rename(attempt.path / "outcome.json")

    def files(self) -> dict[str, tuple[str, int]]:
        """Checksums and times of all files but marks and locks."""
        return {
            path.relative_to(self.runs).as_posix(): (
                hashlib.sha256(path.read_bytes()).hexdigest(),
                path.stat().st_mtime_ns,
            )
            for path in sorted(self.runs.rglob("*"))
            if path.is_file() and path.name not in ("collected.json", "submit.lock", "cell.json")
        }


@pytest.fixture
def there(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "there")


@pytest.fixture
def here(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "here")


@pytest.fixture
def collect(capsys: pytest.CaptureFixture[str], here: Machine) -> Callable[..., tuple[int, str]]:
    def run(source: Machine | str | Path, *words: str) -> tuple[int, str]:
        path = source.runs if isinstance(source, Machine) else source
        capsys.readouterr()
        code = main(["collect", str(path), "--runs", str(here.runs), *words])
        got = capsys.readouterr()
        return code, got.out + got.err

    return run


def test_a_copy_has_the_same_files_and_the_same_frames(there, here, collect):
    for seed in range(3):
        there.run(replace(FIRST, seed=seed, launch={"id": f"a{seed}"}))
    assert collect(there) == (
        0, f"synthetic, 3 cells in {there.runs}: 3 new\n",
    )  # fmt: skip
    assert here.files() == there.files()
    theirs, ours = load(there.sweep.path, cache=False), load(here.sweep.path, cache=False)
    assert theirs.cells.drop(columns="path").equals(ours.cells.drop(columns="path"))
    assert theirs.phases.equals(ours.phases)


def test_collecting_again_copies_nothing_and_reads_no_content(there, here, collect, monkeypatch):
    there.run()
    collect(there)
    before = here.files()
    monkeypatch.setattr(copying, "_copied", lambda *_: pytest.fail("copied again"))
    monkeypatch.setattr(copying, "sha256_of", lambda *_: pytest.fail("read again"))
    assert collect(there) == (0, f"synthetic, 1 cell in {there.runs}: 1 here already\n")
    assert here.files() == before


def test_the_runs_of_two_machines_are_one_sweep(tmp_path, there, here, collect):
    there.run(replace(FIRST, seed=1, launch={"id": "b1"}))
    other = Machine(tmp_path / "other")
    other.run(replace(FIRST, seed=2, launch={"id": "c1"}))
    here.run()
    collect(there)
    assert collect(other.sweep.path)[0] == 0  # the folder of one sweep
    assert sorted(load(here.sweep.path, cache=False).cells["seed"]) == [0, 1, 2]


def test_an_interrupted_collection_goes_on_and_shows_no_part_of_an_attempt(there, here, collect, monkeypatch):
    there.run()
    copied = copying._copied
    done: list[Path] = []

    def breaks(source: Path, target: Path, stamp: copying.Stamp) -> str:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(target)
        return copied(source, target, stamp)

    monkeypatch.setattr(copying, "_copied", breaks)
    assert collect(there)[0] == 130
    assert list(here.sweep.stored()) == []
    assert here.cell().attempts() == []
    again: list[str] = []
    monkeypatch.setattr(copying, "_copied", lambda *all_: (again.append(all_[1].name), copied(*all_))[1])
    assert collect(there)[0] == 0
    assert not {path.name for path in done} & set(again)
    assert here.files() == there.files()


def test_a_cell_that_was_run_twice_stays_as_it_is_and_is_named(there, here, collect):
    there.run(replace(FIRST, launch={"id": "b1"}))
    there.run(replace(FIRST, seed=1, launch={"id": "b2"}))
    here.run()
    before = here.files()
    code, text = collect(there)
    assert code == 1
    assert "attempt-1: is the attempt a1, and" in text
    assert "has b1 by this name: the cell was run twice" in text
    assert {name: here.files()[name] for name in before} == before
    assert len(list(here.sweep.stored())) == 2  # the other cell was collected


def test_an_attempt_never_continues_one_of_another_machine(there, here, collect):
    """As after deleting attempt 1 there: number 2 continues a number 1, and here is another one."""
    there.run(replace(FIRST, launch={"id": "b1"}, state="FAILED"))
    there.run(replace(FIRST, launch={"id": "b2", "continues": 1, "continues_id": "b1"}))
    shutil.rmtree(there.cell().path / "attempt-1")
    here.run(replace(FIRST, state="FAILED"))
    code, text = collect(there)
    assert code == 1
    assert "has no attempt in common with" in text
    assert [one.number for one in here.cell().attempts()] == [1]


def test_runs_that_were_copied_into_each_other_have_no_numbers(there, here):
    there.run(replace(FIRST, launch={"id": "b1"}, state="FAILED"))
    there.run(replace(FIRST, launch={"id": "b2", "continues": 1, "continues_id": "b1"}))
    here.run(replace(FIRST, state="FAILED"))
    shutil.copytree(there.cell().path / "attempt-2", here.cell().path / "attempt-2")
    with pytest.raises(StoredFileError, match="copied into each other"):
        here.cell().attempts()[1].lineage()
    with pytest.warns(LeftOutWarning):
        (row,) = load(here.sweep.path, cache=False).cells.to_dict("records")
    assert not row["valid"]
    assert "copied into each other" in row["why"]


def test_later_attempts_of_the_same_run_are_added(there, here, collect):
    there.run(replace(FIRST, state="FAILED"))
    collect(there)
    there.run(replace(FIRST, launch={"id": "a2", "continues": 1, "continues_id": "a1"}))
    assert collect(there)[1].endswith(": 1 new, 1 here already\n")
    assert [one.number for one in here.cell().attempts()[1].lineage()] == [2, 1]


def test_a_run_that_goes_on_there_is_refreshed_and_decided_by_nobody_here(there, here, collect):
    live = there.run(ended=False)
    assert collect(there)[1].endswith(": 1 still running there\n")
    (status,) = read_statuses(here.sweep)
    assert (status.state, status.elsewhere) == ("RUNNING", str(there.runs))
    assert "runs elsewhere: collected from" in status.cause
    assert cancel([status.cell], here.runs) == []
    copy = here.cell().attempts()[0]
    assert not (copy.path / "cancel").exists()
    assert copy.outcome() is None
    there.end(live)
    assert collect(there)[1].endswith(": 1 refreshed\n")
    assert [one.state for one in read_statuses(here.sweep)] == ["COMPLETED"]
    mark = Collected.read(copy)
    assert mark is not None
    assert mark.ended
    assert here.files() == there.files()


def test_watching_ends_although_a_cell_runs_elsewhere(there, here, collect, capsys):
    there.run(ended=False)
    collect(there)
    assert main(["status", "synthetic", "--watch", "--runs", str(here.runs)]) == 1
    assert "1 RUNNING" in capsys.readouterr().out


def test_pending_attempts_are_not_collected(there, here, collect):
    attempt = there.run(ended=False)
    (attempt.path / "begun.json").unlink()
    assert collect(there)[1].endswith(": 1 not begun there\n")
    assert list(here.sweep.stored()) == []


def test_what_was_changed_there_after_the_end_is_named_and_not_taken_over(there, here, collect):
    attempt = there.run()
    collect(there)
    before = here.files()
    records = attempt.records(0)
    records.write_bytes(records.read_bytes().replace(b'"value": 0.95', b'"value": 0.99'))
    code, text = collect(there)
    assert code == 1
    assert "rank-00000.jsonl differs" in text
    assert "left as it is" in text
    assert here.files() == before


def test_contents_of_equal_size_and_time_are_compared_by_checksum_if_asked(there, here, collect):
    attempt = there.run()
    collect(there)
    copy = here.cell().attempts()[0].records(0)
    state = copy.stat()
    copy.write_bytes(copy.read_bytes().replace(b'"value": 0.95', b'"value": 0.99'))
    os.utime(copy, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert collect(there)[0] == 0
    code, text = collect(there, "--checksum")
    assert code == 1
    assert "rank-00000.jsonl differs" in text
    assert copy.read_bytes() != attempt.records(0).read_bytes()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda one: one.records(0).write_bytes(
                b"".join(one.records(0).read_bytes().splitlines(True)[:-1])
            ),
            "has no seal at its end",
        ),
        (
            lambda one: one.records(0).write_bytes(one.records(0).read_bytes().replace(b"0.95", b"0.96")),
            "crc32=",
        ),
        (lambda one: one.write("environment.json", {"host": "elsewhere"}), "was changed after the attempt"),
        (lambda one: (one.path / "launch.json").unlink(), "is missing; the attempt had it"),
    ],
    ids=["cut", "edited", "small file", "missing"],
)
def test_a_damaged_attempt_is_named_and_not_collected(there, here, collect, damage, message):
    damage(there.run())
    code, text = collect(there)
    assert code == 1
    assert message in text
    assert str(there.runs) in text
    assert list(here.sweep.stored()) == []
    assert here.files() == {}


def test_checkpoints_secrets_and_links_are_left_behind(there, here, collect):
    attempt = there.run()
    for name in ("checkpoints/step-1/rank-00000.pt", "rendezvous.json", "cancel"):
        (attempt.path / name).parent.mkdir(parents=True, exist_ok=True)
        (attempt.path / name).write_text("{}")
    (attempt.path / "secret.json").symlink_to("/etc/hostname")
    assert collect(there, "--no-logs")[0] == 0
    names = {path.name for path in here.cell().attempts()[0].path.rglob("*")}
    assert names == {
        "launch.json", "begun.json", "environment.json", "rank-00000.jsonl", "outcome.json", "collected.json",
    }  # fmt: skip


def test_the_mark_names_every_file_with_its_checksum(there, here, collect):
    there.run()
    collect(there)
    copy = here.cell().attempts()[0]
    mark = json.loads((copy.path / "collected.json").read_text())
    assert mark["identity"] == "a1"
    assert mark["source"] == str(there.runs)
    for name, file in mark["files"].items():
        content = (copy.path / name).read_bytes()
        assert (file["bytes"], file["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    assert "logs/rank-00000.log" in mark["files"]


def test_what_cannot_be_a_source_is_one_sentence(tmp_path, here, collect):
    (tmp_path / "empty").mkdir()
    here.run()
    assert collect(tmp_path / "empty") == (
        2, f"error: {tmp_path / 'empty'} holds no runs; give a folder of runs, or that of one sweep\n",
    )  # fmt: skip
    assert "is not a folder" in collect(tmp_path / "nowhere")[1]
    assert "is the folder of runs itself" in collect(here)[1]
    assert "has no sweep 'other'; it has synthetic" in collect(here, "--sweep", "other")[1]
    assert "must be host:path" in collect(":runs")[1]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In the place of SSH: the real rsync at the other end of a pipe; its calls are logged."""
    if shutil.which("rsync") is None:
        pytest.skip("no rsync")
    script, log = tmp_path / "shell", tmp_path / "calls"
    script.write_text(f'#!/bin/sh\necho "$1" >> {log}\nshift\nexec sh -c "$*"\n')
    script.chmod(0o755)
    monkeypatch.setenv("RSYNC_RSH", str(script))
    return log


def test_a_remote_folder_is_collected_by_rsync_and_its_files_take_no_space_twice(there, here, collect, shell):
    live = there.run(replace(FIRST, seed=1, launch={"id": "b1"}), ended=False)
    there.run()
    (live.path / "checkpoints").mkdir()
    (live.path / "checkpoints" / "large.pt").write_text("x")
    source = f"node7:{there.runs}"
    code, text = collect(source)
    assert (code, text) == (0, f"synthetic, 2 cells in {source}: 1 new, 1 still running there\n")
    assert shell.read_text() == "node7\n"
    records = here.cell().attempts()[0].records(0)
    assert records.stat().st_nlink == 2
    assert not list(here.runs.rglob("*.pt"))
    there.end(live)
    assert collect(source)[1].endswith(": 1 refreshed, 1 here already\n")
    assert list(load(here.runs, cache=False).cells["state"]) == ["COMPLETED"] * 2


def test_a_host_that_cannot_be_reached_is_one_sentence(here, collect, tmp_path, shell):
    code, text = collect(f"node7:{tmp_path / 'nowhere'}")
    assert code == 2
    assert f"error: node7:{tmp_path / 'nowhere'} could not be copied: rsync ended with 23: " in text
