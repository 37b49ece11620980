"""Promise: `python -m harness.bench gpu` keeps each arm as soon as it is measured, and goes on from there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from harness.bench.gpu import GPUBench

BLOCKED = ("pydantic", "pandas", "typer", "submitit", "yaml", "matplotlib", "pynvml")


def rehearsal(out, minutes=5.0, peers=()):
    said = []
    done = GPUBench("cpu", minutes, out, dict(peers)).run(said.append)
    return done, said


@pytest.mark.slow
def test_a_run_writes_every_arm_and_a_second_one_measures_nothing(tmp_path):
    assert rehearsal(tmp_path, peers={"gpauloski": "/nowhere"})[0]
    (file,) = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    assert list(found["networks"]) == ["a small ResNet", "a small BERT"]
    for arms in found["networks"].values():
        assert list(arms) == ["inverse", "eigen", "gpauloski inverse", "gpauloski eigen"]
        assert arms["eigen"]["of_plain"]["median"] > 1
        assert arms["eigen"]["phases"]["full"]["inverse_compute"] > 0
        assert "ModuleNotFoundError" in arms["gpauloski eigen"]["failed"]
    page = file.with_suffix(".md").read_text()
    assert "| a small BERT | eigen | inverse_compute |" in page
    before = file.read_text()
    assert rehearsal(tmp_path, peers={"gpauloski": "/nowhere"})[0]
    assert file.read_text() == before

    found["machine"]["source"] = "of older code"
    del found["networks"]["a small BERT"]
    file.write_text(json.dumps(found))
    assert rehearsal(tmp_path)[0]
    assert list(json.loads(file.read_text())["networks"]) == ["a small ResNet", "a small BERT"]


def test_without_time_nothing_begins_and_the_exit_code_says_so(tmp_path):
    done, said = rehearsal(tmp_path, minutes=0)
    assert not done
    assert said == ["no time left for a small ResNet, inverse: the same command goes on from there"]
    assert not list(tmp_path.iterdir())


@pytest.mark.ranks
def test_it_needs_no_package_that_a_compute_node_may_lack(tmp_path):
    program = f"""
import sys
for name in {BLOCKED!r}: sys.modules[name] = None
from harness.bench.__main__ import main
sys.exit(main(["gpu", "--device", "cpu", "--minutes", "0", "--out", {str(tmp_path)!r}]))
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 3, ran.stderr
    assert "goes on from there" in ran.stdout
