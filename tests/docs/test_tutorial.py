"""Promise: the tutorial works from top to bottom, on real ranks: its commands in order, then its Python.

Only the size differs: one seed, three epochs, of the photographs a quarter.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks_of

TAKE_SET = {"plan", "run"}
KRONSCALE = Path(sys.executable).with_name("kronscale")


def smaller(arguments: list[str]) -> list[str]:
    fields = ["repeats=1", "training.epochs=3"]
    if "jobs/sweeps/images.yaml" in arguments:
        fields += ["workload.options.train_examples=512", "workload.options.test_examples=100"]
    return [word for field in fields for word in ("--set", field)]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timeout(1800)  # six cells and two reports, one after another
def test_a_reader_of_the_tutorial_gets_two_studies_and_their_figures(tmp_path):
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs", ignore=shutil.ignore_patterns("experiments"))
    environment = os.environ | {"KRONSCALE_CACHE": str(tmp_path / "cache"), "MPLBACKEND": "agg"}
    ran = []
    for block in blocks_of("docs/tutorial.md"):
        if block.language == "yaml":
            name = block.text.split("\n")[0].removeprefix("sweep: ")
            (tmp_path / "jobs" / "sweeps" / f"{name}.yaml").write_text(block.text)
        for arguments in block.commands:
            words = [*arguments, *(smaller(arguments) if arguments[0] in TAKE_SET else [])]
            run = subprocess.run(
                [KRONSCALE, *words],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert run.returncode == 0, (words, run.stdout, run.stderr)
            ran.append(arguments[0])
        if block.language == "python":
            run = subprocess.run(
                [sys.executable, "-c", block.text],
                cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert run.returncode == 0, run.stderr
    assert ran == ["plan", "run", "run", "status", "logs", "report", "run", "report"]
    assert (tmp_path / "results/runs/schedule/report/report.html").is_file()
    assert (tmp_path / "learning_curves.pdf").stat().st_size > 5000
    assert (tmp_path / "epochs.pdf").is_file()
    with (tmp_path / "learning_curves.csv").open() as file:
        arms = {row["arm"] for row in csv.DictReader(file)}
    assert {"sgd", "constant", "decaying"} <= {arm.split()[0] for arm in arms}
