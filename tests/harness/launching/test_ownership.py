"""Promise: what another user can have written into a run folder is shown, and never executed."""

import multiprocessing
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import harness.study.submit
from harness.errors import ForeignError
from harness.launchers import LAUNCHERS
from harness.launchers.launch import Launch
from harness.launchers.local import LocalLauncher
from harness.launchers.local.queue import pending
from harness.launchers.local.supervisor import supervise_attempt
from harness.launchers.process_identity import ProcessIdentity
from harness.launchers.site_profile import Site
from harness.runs.ownership import foreign, read_own
from harness.runs.store import CellFolder, SweepFolder, sweep_folder
from harness.runs.stored_files import parse_object
from harness.study.status import read_statuses
from harness.study.submit import cancel, submit

OTHER = 61_234  # a user without an entry
VICTIM = 61_235


@pytest.fixture
def planted(tmp_path, make_attempt, make_cell):
    """A pending attempt of this user's own, and the parts of its path from the sweep's folder down."""
    attempt = make_attempt(make_cell())
    return attempt, [
        attempt.path.parent.parent,
        attempt.path.parent,
        attempt.path,
        attempt.path / "launch.json",
    ]


def _swap_for_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _swap_for_a_pipe(path: Path) -> None:
    if path.is_dir():
        pytest.skip("a folder")
    path.unlink()
    os.mkfifo(path, 0o600)


def _give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, OTHER, OTHER)


CHANGES = {
    "may be written by other users": lambda path: path.chmod(path.stat().st_mode | stat.S_IWGRP),
    r"may be written by other users \(mode 0?[27]?.*7": lambda path: path.chmod(0o777),
    "is a symbolic link": _swap_for_a_link,
    "is neither a file nor a folder": _swap_for_a_pipe,
    "belongs to user 61234": _give_away,
}


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("reason", CHANGES)
def test_an_attempt_that_others_can_have_written_is_not_started(planted, level, reason):
    attempt, parts = planted
    sweep = parts[0]
    assert foreign(parts[-1], sweep) is None
    assert parse_object(read_own(parts[-1], sweep), parts[-1]) == attempt.read("launch.json")
    assert list(pending(sweep_folder("study", sweep.parent))) == [attempt]
    CHANGES[reason](parts[level])
    with pytest.raises(ForeignError, match=rf"{parts[level]} {reason}.*shared_runs"):
        read_own(parts[-1], sweep)
    with pytest.raises(ForeignError, match=reason):
        supervise_attempt(str(attempt.path))
    assert not (attempt.path / "gang.json").exists()
    assert list(pending(sweep_folder("study", sweep.parent))) == []


def test_the_site_can_allow_it(planted, tmp_path, site):
    attempt, parts = planted
    parts[1].chmod(0o777)
    shared = site.model_copy(update={"shared_runs": True})
    assert list(pending(sweep_folder("study", tmp_path), shared_runs=True)) == [attempt]
    assert Launch.read_to_execute(attempt, shared_runs=True).site.name == "test"
    assert harness.study.submit._own_folder([attempt.cell_folder.cell()], shared, tmp_path).path == parts[0]


def test_submit_refuses_a_sweep_that_others_may_write(planted, tmp_path, site):
    attempt, parts = planted
    parts[0].chmod(0o770)
    with pytest.raises(ForeignError, match=rf"{parts[0]} may be written by other users \(mode 0770\)"):
        submit([attempt.cell_folder.cell()], site, tmp_path)


def test_status_says_why_a_planted_attempt_is_not_started(planted, tmp_path):
    attempt, _ = planted
    attempt.path.chmod(0o777)
    (status,) = read_statuses(sweep_folder("study", tmp_path))
    assert status.state == "PENDING"
    assert status.cause.startswith("not started without shared_runs")
    assert str(attempt.path) in status.cause


def test_a_folder_of_all_sweeps_that_everybody_may_write_must_be_sticky(planted, tmp_path):
    attempt, parts = planted
    tmp_path.chmod(0o1777)
    assert foreign(parts[-1], parts[0]) is None
    tmp_path.chmod(0o777)
    with pytest.raises(ForeignError, match=r"may be written by all users \(mode 0777\) and is not sticky"):
        supervise_attempt(str(attempt.path))


def test_cancel_signals_no_process_that_others_have_named(planted, tmp_path, monkeypatch):
    attempt, _ = planted
    attempt.write("gang.json", ProcessIdentity.mine().to_dict())
    ended = []
    monkeypatch.setattr(ProcessIdentity, "terminate", lambda self: ended.append(self.pid))
    attempt.path.chmod(0o777)
    LAUNCHERS["local"].cancel([attempt])
    assert ended == []
    attempt.path.chmod(0o700)
    LAUNCHERS["local"].cancel([attempt])
    assert ended == [os.getpid()]
    cancel([attempt.cell_folder.cell()], tmp_path)


def test_a_folder_prepared_by_others_is_not_used_for_a_new_attempt(tmp_path, make_cell, site, monkeypatch):
    monkeypatch.setattr(LocalLauncher, "resume", lambda *_, **__: None)
    cell = make_cell()
    prepared = sweep_folder("study", tmp_path).stage(cell).new_attempt()
    prepared.path.chmod(0o777)
    submit([cell], site, tmp_path)
    latest = prepared.cell_folder.latest()
    assert latest.number == 2
    assert (latest.path / "launch.json").exists()


def _plant(folder: CellFolder, launch: Launch) -> None:
    attempt = folder.new_attempt()
    attempt.path.chmod(0o755)
    launch.write(attempt)
    (attempt.path / "launch.json").chmod(0o644)


def _submit_with_all_means(folder: CellFolder, site: Site) -> list[str]:
    """What a user learns who submits again, closes the folder too late, and starts queue and supervisor."""
    (cell, root), said = (folder.cell(), folder.path.parent.parent), []
    try:
        submit([cell], site, root)
    except ForeignError as error:
        said.append(str(error))
    folder.path.chmod(0o700)
    folder.path.parent.chmod(0o700)
    sweep = SweepFolder(folder.path.parent)
    started = [attempt.path.name for attempt in pending(sweep, shared_runs=site.shared_runs)]
    said.append(f"started: {started}")
    try:
        said.append(str(supervise_attempt(str(folder.latest().path), shared_runs=site.shared_runs)))
    except ForeignError as error:
        said.append(str(error))
    return said


@pytest.fixture
def two_users(make_cell):
    """A cell of VICTIM's in folders that all users may write, with an attempt that OTHER planted there."""
    base = Path(tempfile.mkdtemp(prefix="kronscale-two-users-"))
    base.chmod(0o1777)
    folder = sweep_folder("study", base / "runs").stage(make_cell())
    for path in (base / "runs", folder.path.parent, folder.path, folder.path / "cell.json"):
        os.chown(path, VICTIM, VICTIM)
    for path in (folder.path.parent, folder.path):
        path.chmod(0o777)
    site = Site(name="test", oversubscribe=True, shared_runs=True)
    command = ("/bin/sh", "-c", f"id -u > {base}/executed")
    _as(OTHER, base, _plant, folder, LAUNCHERS["local"].plan(make_cell(), site, command))
    assert folder.latest().path.stat().st_uid == OTHER
    yield base, folder
    shutil.rmtree(base)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
def test_a_launch_file_that_another_user_planted_is_not_executed(two_users):
    base, folder = two_users
    said = _as(VICTIM, base, _submit_with_all_means, folder, Site(name="test", oversubscribe=True))
    planted = folder.latest().path
    assert said[0].startswith(f"{folder.path.parent} may be written by other users (mode 0777); what others")
    assert said[1] == "started: []"
    assert said[2].startswith(f"{planted} belongs to user {OTHER}, not to {VICTIM}; what others may have ")
    assert sorted(path.name for path in planted.iterdir()) == ["launch.json", "logs"]
    assert not (base / "executed").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")
def test_a_launch_file_of_another_user_is_executed_where_the_site_says_so(two_users, monkeypatch):
    """Why it matters: the command runs as the user who submits."""
    base, folder = two_users
    everybodys = shutil.which("python3", path="/usr/local/bin:/usr/bin")
    if everybodys is None:
        pytest.skip("no Python that every user can execute")
    monkeypatch.setattr(sys, "executable", everybodys)
    folder.latest().path.chmod(0o777)  # it is the other user's, who shares it
    (folder.latest().path / "logs").chmod(0o777)
    site = Site(name="test", oversubscribe=True, shared_runs=True)
    _as(VICTIM, base, _submit_with_all_means, folder, site)
    assert (base / "executed").read_text() == f"{VICTIM}\n"


def _as(user: int, base: Path, act: Callable[..., Any], *arguments: Any) -> Any:
    """Result of a call in a process that belongs to `user`."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def call() -> None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        os.environ["KRONSCALE_LEASES"] = str(base / "leases")
        tempfile.tempdir = str(base)
        theirs.send(act(*arguments))

    process = context.Process(target=call)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return ours.recv()
