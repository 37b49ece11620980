"""Promise: `make gpu` runs each part by itself, keeps what each found, says what failed, and can go on later.

Without a GPU it is rehearsed on the CPU, and the branches for CUDA run on a device without data.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.bench.gpu import acceptance
from harness.bench.gpu.acceptance import Acceptance, exit_code
from harness.bench.gpu.activity import count
from harness.bench.gpu.findings import Findings
from harness.bench.gpu.parts import PARTS
from harness.errors import UserError

ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}  # more would spin for the CPUs that other tests have
MACHINE = {"device": "a GPU", "torch": "2.13", "source": "abc"}


@pytest.fixture
def started(monkeypatch):
    """What each part does instead of starting its process; the names of those that were started."""
    ways: dict[str, Any] = {}
    names: list[str] = []

    def in_a_process(name: str, options: dict[str, Any], log: Path) -> tuple[int | None, str]:
        names.append(name)
        findings = Findings(Path(options["folder"]) / f"{name}.json", options["about"])
        findings.row("sizes", size=1, seconds=0.25)
        return ways.get(name, passes)(findings)

    monkeypatch.setattr(acceptance, "_in_a_process", in_a_process)
    monkeypatch.setattr(Acceptance, "_machine", lambda self: dict(MACHINE))
    return ways, names


def passes(findings: Findings) -> tuple[int | None, str]:
    findings.check("one", "1", passed=True)
    findings.finish(complete=True)
    return 0, ""


def fails(findings: Findings) -> tuple[int | None, str]:
    findings.check("closure", "1.2 of the wall", passed=False)
    findings.finish(complete=True)
    return 0, ""


def breaks(findings: Findings) -> tuple[int | None, str]:
    return 1, "RuntimeError: CUDA out of memory"


def hangs(findings: Findings) -> tuple[int | None, str]:
    return None, ""


def test_a_part_that_fails_breaks_or_hangs_is_recorded_with_its_rows_and_the_others_run(started, tmp_path):
    ways, names = started
    ways |= {"timer": fails, "resnet32": breaks, "bert": hangs}
    said: list[str] = []
    assert Acceptance(out=tmp_path).run(said.append) == 1
    assert names == list(PARTS)
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in PARTS}
    outcomes = {name: part["outcome"] for name, part in found.items() if part["outcome"] != "passed"}
    assert outcomes == {"timer": "failed", "resnet32": "broke off", "bert": "out of time"}
    assert all(part["tables"] == {"sizes": [{"size": 1, "seconds": 0.25}]} for part in found.values())
    assert (tmp_path / "bert-sizes.csv").read_text() == "size,seconds\n1,0.25\n"
    page = (tmp_path / "report.md").read_text()
    assert "CUDA out of memory" in page
    assert "does not hold: timer: closure: 1.2 of the wall" in said


def test_a_later_run_repeats_only_what_has_not_passed_with_this_code_on_this_device(
    started, monkeypatch, tmp_path
):
    ways, names = started
    ways["bert"] = breaks
    Acceptance(out=tmp_path).run(lambda line: None)
    names.clear()
    del ways["bert"]
    assert Acceptance(out=tmp_path).run(lambda line: None) == 0
    assert names == ["bert"]
    names.clear()
    monkeypatch.setitem(MACHINE, "source", "abd")
    assert Acceptance(out=tmp_path, parts=("timer", "bert")).run(lambda line: None) == 0
    assert names == ["timer", "bert"]
    names.clear()
    assert Acceptance(out=tmp_path, parts=("timer",), again=True).run(lambda line: None) == 0
    assert names == ["timer"]


def test_what_has_not_begun_when_the_time_is_over_is_not_run_and_says_so(started, tmp_path):
    _, names = started
    assert Acceptance(out=tmp_path, minutes=0.1, parts=("timer", "bert")).run(lambda line: None) == 3
    assert names == []
    assert json.loads((tmp_path / "bert.json").read_text())["outcome"] == "not run"


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (["passed", "passed"], 0),
        (["passed", "out of time"], 3),
        (["not run", "broke off"], 1),
        (["failed"], 1),
    ],
)
def test_the_exit_code_says_what_is_worst(outcomes, code):
    assert exit_code(outcomes) == code


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ("timr",)}, "allowed are exactness, timer"),
        ({"device": "tpu"}, "not one of cuda, cpu"),
        ({"minutes": 0.0}, "above 0"),
    ],
)
def test_bad_options_are_errors(options, message):
    with pytest.raises(UserError, match=message):
        Acceptance(**options)


def test_the_parts_of_a_run_fit_into_25_minutes():
    assert sum(part.seconds for part in PARTS.values()) <= 25 * 60


def test_launches_and_waits_are_counted_in_a_trace():
    def event(cat: str, name: str, start: float, seconds: float) -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": start, "dur": seconds}

    found = count([
        event("user_annotation", "kronscale.measured", 0, 100),
        event("user_annotation", "kronscale.inverse_compute", 10, 20),
        event("kernel", "gemm", 12, 5), event("kernel", "elementwise", 150, 1),
        event("gpu_memcpy", "Memcpy DtoH", 15, 1),
        event("cuda_runtime", "cudaLaunchKernel", 11, 1),
        event("cuda_runtime", "cudaStreamSynchronize", 15, 1),
        event("cuda_runtime", "cudaMemcpy", 50, 1),
        event("cuda_runtime", "cudaDeviceSynchronize", 120, 1),  # the profiler's own, after the step
        {"cat": "kernel", "name": "without a duration"},
    ])  # fmt: skip
    assert (found.launches, found.copies, found.kernel_seconds) == (2, 1, 6e-6)
    assert found.waits == {"inverse_compute: cudaStreamSynchronize": 1, "other: cudaMemcpy": 1}


@pytest.mark.ranks
def test_no_part_needs_pydantic_pandas_or_typer():
    blocked = ("pydantic", "pandas", "typer", "rich", "submitit", "yaml", "matplotlib", "pynvml")
    modules = sorted({f"harness.bench.gpu.parts.{part.module}" for part in PARTS.values()})
    program = f"""
import sys
for name in {blocked!r}: sys.modules[name] = None
from importlib import import_module
for name in {[*modules, "harness.bench.gpu.rank", "harness.bench.gpu.__main__"]!r}: import_module(name)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles a CUDA device without data")
def test_every_part_runs_on_a_cuda_device_without_data(tmp_path):
    parts = [name for name in PARTS if name not in ("ranks", "resnet32", "resnet50")]  # as bert and timer do
    ran = subprocess.run(
        [sys.executable, "-m", "tests.harness.fake_gpu_parts", str(tmp_path), ",".join(parts)],
        env=ONE_THREAD, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    outcomes = json.loads(ran.stdout.splitlines()[-1])
    assert outcomes == dict.fromkeys(parts, "ran"), "\n".join(outcomes.values())


@pytest.mark.ranks
@pytest.mark.slow
def test_the_run_is_rehearsed_on_the_cpu(tmp_path):
    command = [sys.executable, "-m", "harness.bench.gpu", "--device", "cpu", "--out", str(tmp_path)]
    ran = subprocess.run(command, env=ONE_THREAD, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    page = (tmp_path / "report.md").read_text()
    for name in PARTS:
        part = json.loads((tmp_path / f"{name}.json").read_text())
        assert part["outcome"] == "passed", part
        assert part["tables"], f"{name} found nothing"
        assert f"## {name}:" in page
    assert len(list(tmp_path.glob("*.svg"))) == 7
    rows = csv.DictReader((tmp_path / "exactness-float64.csv").read_text().splitlines())
    errors = [float(row["error"]) for row in rows]
    assert len(errors) == 58
    assert 0 < max(errors) < 1e-2, "the device's form and the reference are not the same code"
