"""Promise: on a full disk a submission happens whole or not at all, and a command says so in one line."""

import errno
import fcntl
import os
import subprocess

import pytest

from harness.cli import main
from harness.doctor.storage import check_storage
from harness.errors import StoreError
from harness.launchers.local import LocalLauncher
from harness.launchers.ranks.outcome import outcome_without_ranks
from harness.runs.store import sweep_folder
from harness.runs.stored_files import write_once
from harness.study.status import read_statuses
from harness.study.submit import cancel, retry, submit

DISK_BYTES = 1024 * 1024


@pytest.fixture
def queues(monkeypatch):
    """Queues that submissions would have started."""
    started = []
    monkeypatch.setattr(LocalLauncher, "finish_submission", lambda _, folder, **__: started.append(folder))
    return started


@pytest.fixture
def fail_after(monkeypatch):
    """From the n-th call on, everything that takes space fails; returns how many calls there were."""

    def install(allowed, error=errno.ENOSPC):
        calls = []

        def checked(call):
            def act(*arguments, **options):
                writes = call.__name__ != "open" or arguments[1] & os.O_CREAT
                calls.extend([call.__name__] if writes else [])
                if writes and len(calls) > allowed:
                    named = [] if isinstance(arguments[0], int) else [str(arguments[0])]
                    raise OSError(error, os.strerror(error), *named)
                return call(*arguments, **options)

            return act

        patched = pytest.MonkeyPatch()
        for name in ("mkdir", "open", "write", "fsync", "link"):  # what takes space
            patched.setattr(os, name, checked(getattr(os, name)))
        return calls, patched

    return install


def test_a_submission_that_fails_at_any_write_leaves_nothing(tmp_path, make_cell, site, queues, fail_after):
    cells = [make_cell(seed=seed) for seed in range(3)]
    for allowed in range(1000):
        root = tmp_path / str(allowed)
        calls, patched = fail_after(allowed, errno.EDQUOT)
        try:
            submit(cells, site, root)
        except (StoreError, OSError) as raised:
            assert str(root) in str(raised)
        finally:
            patched.undo()
        states = [status.state for status in read_statuses(sweep_folder("study", root), cells)]
        if len(calls) <= allowed:
            assert states == ["PENDING"] * 3
            break
        assert states == ["STAGED"] * 3
        assert not queues
        assert not [path for path in root.rglob("*") if path.name != "submit.lock" and path != root / "study"]
        assert cancel(cells, root) == []
    assert allowed > 30
    assert len(queues) == 1
    assert cancel(cells, root) == cells


def test_a_retry_that_fails_at_any_write_leaves_the_cell_as_it_was(
    tmp_path, make_cell, site, queues, fail_after
):
    cell = make_cell()
    first = sweep_folder("study", tmp_path).stage(cell).new_attempt()
    first.write_outcome(outcome_without_ranks("FAILED", "its first"))
    before = sorted(tmp_path.rglob("*"))
    for allowed in range(1000):
        calls, patched = fail_after(allowed)
        try:
            retry([cell], site, tmp_path)
        except (StoreError, OSError):
            assert len(calls) > allowed
        finally:
            patched.undo()
        (status,) = read_statuses(sweep_folder("study", tmp_path), [cell])
        if len(calls) <= allowed:
            break
        assert (status.state, status.cause) == ("FAILED", "its first")
        assert sorted(path for path in tmp_path.rglob("*") if path.name != "submit.lock") == before
    assert allowed > 5
    assert (status.state, status.attempt.number) == ("PENDING", 2)


@pytest.fixture
def disk(tmp_path):
    """A file system of a megabyte, and how to leave only so many bytes of it free."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=0700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(words, capture_output=True, check=False).returncode != 0:
        pytest.skip("only root can mount a file system")
    filler = folder / "filler"

    def leave(free):
        filler.unlink(missing_ok=True)
        while True:
            found = os.statvfs(folder)
            surplus = found.f_bavail * found.f_frsize - free
            if surplus <= 0:
                return
            with filler.open("ab") as file:
                file.write(bytes(surplus))

    yield folder, leave
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_on_a_real_disk_each_amount_of_space_submits_all_or_nothing_and_cancel_works(
    disk, make_cell, site, queues
):
    folder, leave = disk
    cells = [make_cell(seed=seed) for seed in range(3)]
    seen = set()
    for kibibytes in range(0, 100, 4):
        root = folder / f"runs-{kibibytes}"
        leave(kibibytes * 1024)
        try:
            submit(cells, site, root)
        except StoreError as error:
            assert "No space left on device; nothing was submitted: free some space" in str(error)
        leave(DISK_BYTES // 2)
        (state,) = {status.state for status in read_statuses(sweep_folder("study", root), cells)}
        seen.add(state)
        if state == "PENDING":
            assert cancel(cells, root) == cells
            statuses = read_statuses(sweep_folder("study", root), cells)
            assert {(one.state, one.cause) for one in statuses} == {
                ("CANCELLED", "cancelled before it started")
            }
        else:
            assert not list(root.rglob("attempt-*"))
    assert seen == {"STAGED", "PENDING"}


def test_on_a_full_disk_a_command_ends_with_one_line_and_works_once_there_is_space(
    disk, make_cell, site, queues, capsys
):
    folder, leave = disk
    runs = str(folder / "runs")
    submit([make_cell()], site, folder / "runs")
    leave(0)
    assert main(["cancel", "study", "--runs", runs]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert line.endswith("outcome.json: No space left on device")
    assert not list(folder.rglob(".outcome*"))
    leave(DISK_BYTES // 2)
    assert main(["cancel", "study", "--runs", runs]) == 0
    assert capsys.readouterr().out == "1 cell cancelled\n"


def test_a_file_system_without_hard_links_is_named_with_what_to_do(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "empty" / "outcome.json"
    path.parent.mkdir()
    with pytest.raises(StoreError, match=f"{path}: its file system refuses hard links .*--runs"):
        write_once(path, "text")
    assert not list(path.parent.iterdir())


def test_a_file_system_without_locks_is_named_with_what_to_do(tmp_path, make_cell, site, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(
        StoreError, match=rf"{tmp_path}/study/submit.lock: its file system refuses locks .*--runs"
    ):
        submit([make_cell()], site, tmp_path)
    (finding,) = [one for one in check_storage(tmp_path / "a" / "b" / "c") if one.check == "runs: lock"]
    assert (finding.state, "refuses locks (No locks available)" in finding.found) == ("fault", True)
