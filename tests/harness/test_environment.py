"""Promise: a run's environment has the commit of this code and no other; reading it never ends the run."""

import subprocess
from pathlib import Path

import pytest
import torch

from harness.training import environment
from harness.training.environment import read_environment


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit, and this module in a folder inside of it."""

    def make(*, tracked):
        module = tmp_path / ".venv" / "harness" / "environment.py"
        module.parent.mkdir(parents=True)
        module.write_text("")
        git(tmp_path, "init", "--quiet")
        if tracked:
            git(tmp_path, "add", str(module))
        git(tmp_path, "commit", "--quiet", "--allow-empty", "--message=one")
        monkeypatch.setattr(environment, "__file__", str(module))
        return module, git(tmp_path, "rev-parse", "HEAD")

    return make


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e"]
    return subprocess.check_output(["git", "-C", str(folder), *identity, *arguments], text=True).strip()


def commit_and_dirty():
    found = read_environment(torch.device("cpu"), "gloo", ("here",))
    return found.commit, found.dirty


def test_a_checkout_has_its_commit_and_whether_it_was_changed(checkout):
    module, commit = checkout(tracked=True)
    assert commit_and_dirty() == (commit, False)
    module.write_text("changed")
    assert commit_and_dirty() == (commit, True)


def test_a_package_inside_another_repository_has_no_commit(checkout):
    checkout(tracked=False)
    assert commit_and_dirty() == (None, None)


def test_a_package_that_is_not_installed_is_left_out(monkeypatch):
    monkeypatch.setattr(environment, "PACKAGES", ("torch", "no-such-package"))
    assert list(read_environment(torch.device("cpu"), "gloo", ("here",)).packages) == ["torch"]


def test_a_git_that_does_not_answer_times_out(checkout, monkeypatch):
    checkout(tracked=True)
    monkeypatch.setattr(environment, "_GIT_SECONDS", 0.0)
    assert commit_and_dirty() == (None, None)
