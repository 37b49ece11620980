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
from harness.launchers.launch import Launch, ProcessIdentity
from harness.launchers.local.queue import pending
from harness.launchers.local.supervisor import supervise_attempt
from harness.launchers.site_profile import Site
from harness.runs.store import CellFolder, SweepFolder, sweep_folder
from harness.runs.stored_files import foreign
from harness.study.status import read_statuses
from harness.study.submit import submit

OTHER = 61_234  # a user without an entry
VICTIM = 61_235


@pytest.fixture
def planted(tmp_path, make_attempt, make_cell):
    """A pending attempt of this user's own."""
    return make_attempt(make_cell())


def _swap_for_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _give_away(path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, OTHER, OTHER)


CHANGES = {
    "may be written by other users": lambda path: path.chmod(path.stat().st_mode | stat.S_IWGRP),
    "is a symbolic link": _swap_for_a_link,
    "belongs to user 61234": _give_away,
}


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("reason", CHANGES)
def test_an_attempt_that_others_can_have_written_is_not_started_and_status_says_why(
    planted, level, reason, tmp_path
):
    path, folder = planted.path / "launch.json", sweep_folder("study", tmp_path)
    changed = [path, *path.parents][level]
    assert foreign(path, folder.path) == ""
    assert list(pending(folder)) == [planted]
    CHANGES[reason](changed)
    with pytest.raises(ForeignError, match=rf"{changed} {reason}.*shared_runs"):
        supervise_attempt(str(planted.path))
    assert not (planted.path / "supervisor.json").exists()
    assert list(pending(folder)) == []
    (status,) = read_statuses(folder)
    assert status.state == "PENDING"
    assert status.cause.startswith(f"not started without shared_runs in the site profile: {changed} {reason}")


def test_cancel_signals_no_process_that_others_have_named(planted, monkeypatch):
    planted.write("supervisor.json", ProcessIdentity.mine().to_dict())
    ended = []
    monkeypatch.setattr(ProcessIdentity, "terminate", lambda self: ended.append(self.pid))
    planted.path.chmod(0o777)
    LAUNCHERS["local"].cancel([planted])
    assert ended == []
    planted.path.chmod(0o700)
    LAUNCHERS["local"].cancel([planted])
    assert ended == [os.getpid()]


def test_the_site_can_allow_it(planted, tmp_path, site):
    (planted.path / "launch.json").chmod(0o666)
    planted.path.parent.parent.chmod(0o777)
    shared = site.model_copy(update={"shared_runs": True})
    assert list(pending(sweep_folder("study", tmp_path), shared_runs=True)) == [planted]
    assert Launch.read_to_execute(planted, shared_runs=True).site.name == "test"
    cells = [planted.cell_folder.cell()]
    assert harness.study.submit._own_folder(cells, shared, tmp_path).path == planted.path.parent.parent


def test_submit_refuses_a_sweep_that_others_may_write(planted, tmp_path, site):
    sweep = planted.path.parent.parent
    sweep.chmod(0o770)
    with pytest.raises(ForeignError, match=rf"{sweep} may be written by other users \(mode 0770\)"):
        submit([planted.cell_folder.cell()], site, tmp_path)


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
        os.environ["KRONSCALE_LOCKS"] = str(base / "locks")
        tempfile.tempdir = str(base)
        theirs.send(act(*arguments))

    process = context.Process(target=call)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return ours.recv()
