"""Runs the parts of an acceptance one after another, each in a process of its own (no torch here).

A part that fails, breaks off or takes too long is recorded, and the next one starts. A part that has passed
with the same code on the same device is not run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.bench.gpu.findings import (
    BROKEN,
    FAILED,
    NOT_RUN,
    PASSED,
    TIMED_OUT,
    Row,
    failed_checks,
    read_json,
    write_json,
    write_tables,
)
from harness.bench.gpu.page import write_page
from harness.bench.gpu.parts import PARTS
from harness.errors import UserError

ROOT = Path(__file__).parents[3]
OUT = {"cuda": Path("results/gpu"), "cpu": Path("results/derived/gpu-rehearsal")}
EXIT_FAILED, EXIT_INCOMPLETE = 1, 3
_GRACE_SECONDS = 20  # beyond a part's own limit, for the step that it is in
_REHEARSAL = 5  # times a part's time, because machines that test are shared
_LEAST_SHARE = 0.5  # of a part's time; with less it is left to the next run


@dataclass(frozen=True)
class Acceptance:
    """What to run.

    Attributes:
        device: `cuda`, or `cpu` for a rehearsal on small sizes.
        parts: names; empty for all.
        out: folder of the results.
        minutes: for everything; what has not begun by then is recorded as not run.
        again: also run parts that have passed.
        data: folder with CIFAR-10's batch files, or None for the embedded part of it.
        gpauloski, lzhangbv: checkouts of the two public K-FAC packages, or None.
    """

    device: str = "cuda"
    parts: tuple[str, ...] = ()
    out: Path | None = None
    minutes: float = 25.0
    again: bool = False
    data: str | None = None
    gpauloski: str | None = None
    lzhangbv: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot be run.

        Raises:
            UserError: an unknown device or part, or no time.
        """
        if self.device not in OUT:
            raise UserError(f"--device {self.device!r} is not one of {', '.join(OUT)}")
        if unknown := [name for name in self.parts if name not in PARTS]:
            raise UserError(f"--parts {','.join(unknown)!r}: allowed are {', '.join(PARTS)}")
        if not self.minutes > 0:
            raise UserError(f"--minutes must be above 0, got {self.minutes:g}")

    @property
    def folder(self) -> Path:
        """Where the results go."""
        return self.out if self.out is not None else OUT[self.device]

    def run(self, say: Callable[[str], None] = print) -> int:
        """Run the parts; returns the exit code.

        0: every part asked for has passed. 1: a check does not hold, or a part broke off. 3: a part ran out
        of time or was not run.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        ends = time.monotonic() + 60 * self.minutes
        machine = self._machine()
        say(f"{machine['device']}, torch {machine['torch']}; results in {self.folder}")
        wanted = self.parts or tuple(PARTS)
        for name in wanted:
            if not self.again and self._has_passed(name, machine):
                say(f"{name}: passed before")
                continue
            found = self._run_part(name, machine, ends)
            write_tables(self.folder, name, found["tables"])
            say(f"{name}: {found['outcome']} ({found['seconds']:.0f} s){_end(found)}")
        found = {part["part"]: part for part in self._found()}
        for line in failed_checks(found[name] for name in wanted):
            say(f"does not hold: {line}")
        say(f"report: {write_page(self.folder, list(found.values()))}")
        return exit_code([found[name]["outcome"] for name in wanted])

    def _found(self) -> list[Row]:
        parts = [read_json(self._file(name)) for name in PARTS]
        return [part for part in parts if part is not None]

    def _file(self, part: str) -> Path:
        return self.folder / f"{part}.json"

    def _machine(self) -> Row:
        """What identifies the results, asked in a process of its own: this one never loads torch."""
        asked = subprocess.run(
            [sys.executable, "-m", "harness.bench.gpu.machine", self.device],
            capture_output=True, text=True, check=False, cwd=ROOT,
        )  # fmt: skip
        if asked.returncode:
            last = asked.stderr.strip().splitlines()[-1:] or ["no message"]
            raise UserError(f"--device {self.device} cannot be used: {last[0]}")
        machine: Row = json.loads(asked.stdout)
        return {**machine, "source": source_digest()}

    def _has_passed(self, name: str, machine: Row) -> bool:
        found = read_json(self._file(name))
        return (
            found is not None
            and found.get("outcome") == PASSED
            and all(found.get(key) == machine[key] for key in ("device", "source", "torch"))
        )

    def _run_part(self, name: str, machine: Row, ends: float) -> Row:
        path, began = self._file(name), time.monotonic()
        about = {"part": name, "about": PARTS[name].about, **machine}
        left, whole = ends - began, float(PARTS[name].seconds)
        empty = {**about, "checks": [], "notes": [], "tables": {}, "seconds": 0.0}
        if left - _GRACE_SECONDS < _LEAST_SHARE * whole and self.device == "cuda":
            why = f"{max(left, 0):.0f} s of the run were left, and it may need {whole:.0f} s"
            found = {**(read_json(path) or empty), "outcome": NOT_RUN, "notes": [why]}  # with older rows
            write_json(path, found)
            return found
        path.unlink(missing_ok=True)
        seconds = min(whole, left - _GRACE_SECONDS) if self.device == "cuda" else _REHEARSAL * whole
        options = {**asdict(self), "folder": str(self.folder.resolve()), "seconds": seconds, "about": about}
        code, end = _in_a_process(name, options, self.folder / f"{name}.log")
        found = read_json(path) or empty
        if code is None:
            found |= {"outcome": TIMED_OUT}
            found["notes"].append(f"stopped after {seconds:.0f} s and {_GRACE_SECONDS} s of grace")
        elif code:
            found |= {"outcome": BROKEN, "error": end}
        found["seconds"] = time.monotonic() - began
        write_json(path, found)
        return found


def exit_code(outcomes: Sequence[str]) -> int:
    """The worst of the outcomes: failures count before missing time."""
    if any(outcome in (FAILED, BROKEN) for outcome in outcomes):
        return EXIT_FAILED
    return EXIT_INCOMPLETE if any(outcome != PASSED for outcome in outcomes) else 0


def source_digest() -> str:
    """A digest of the code that is accepted: another one, and all parts run again."""
    digest = hashlib.sha256()
    for folder in ("kfac_core", "harness/bench", "harness/workloads"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _in_a_process(name: str, options: dict[str, Any], log: Path) -> tuple[int | None, str]:
    """Exit code of a part, None if it was stopped, and the last line of its log."""
    command = [sys.executable, "-m", "harness.bench.gpu.setting", name, json.dumps(options, default=str)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=out, cwd=ROOT, env=environment, start_new_session=True
        )
    code: int | None
    try:
        code = process.wait(options["seconds"] + _GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it started
            process.wait()
    lines = log.read_text(errors="replace").strip().splitlines()
    return code, lines[-1] if lines else "no message"


def _end(found: Row) -> str:
    return f": {found['error']}" if found["outcome"] == BROKEN else ""
