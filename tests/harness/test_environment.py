"""Promise: a run's environment names the commit of this code and no other, and never ends the run."""

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


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=n", "-c", "user.email=e"]
    return subprocess.check_output(["git", "-C", str(folder), *who, *words], text=True).strip()


def seen():
    found = read_environment(torch.device("cpu"), "gloo", ("here",))
    return found.commit, found.dirty


def test_a_checkout_is_told_with_its_commit_and_whether_it_was_changed(checkout):
    module, commit = checkout(tracked=True)
    assert seen() == (commit, False)
    module.write_text("changed")
    assert seen() == (commit, True)


def test_a_package_inside_of_somebody_else_s_repository_has_no_commit(checkout):
    checkout(tracked=False)
    assert seen() == (None, None)


def test_a_git_that_does_not_answer_is_not_waited_for(checkout, monkeypatch):
    checkout(tracked=True)
    monkeypatch.setattr(environment, "_GIT_SECONDS", 0.0)
    assert seen() == (None, None)
