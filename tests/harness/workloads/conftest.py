"""Small disks that can be filled, and a folder of the test run for token ids."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path):
    """Mounts a disk of so many kilobytes at a folder."""
    mounted = []

    def mount(folder: Path, kilobytes: int):
        folder.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a disk that is full takes the right to mount one: {done.stderr.strip()}")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.fixture(scope="session")
def token_cache(tmp_path_factory):
    return tmp_path_factory.mktemp("tokens")


@pytest.fixture(autouse=True)
def _own_cache(token_cache, monkeypatch):
    monkeypatch.setenv("KRONSCALE_CACHE", str(token_cache))
