"""Runs tests on copies of the working tree, whole or with one mutant, and keeps what was found."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Lock
from types import TracebackType
from typing import NamedTuple, Self

from jobs.experiments.mutants.mutant import ROOT, Mutant, Package

PROCESSES = 2
LIMIT_SECONDS = 900
"""Of the tests of a mutant; more is what a mutant does that waits for ever."""

SURVIVED = ""
_ENDED = {0, 1}  # pytest's exit codes of tests that were run
_PAUSE_SECONDS = 5.0


class Job(NamedTuple):
    """A mutant of a package."""

    package: Package
    mutant: Mutant

    @property
    def key(self) -> str:
        """What its result depends on; see `Package.key`."""
        return self.package.key(self.mutant)

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.package.name}: {self.mutant.name}"


class Findings:
    """Results by key, in a file that is written after each: a run that was stopped continues."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}

    def get(self, key: str) -> str | None:
        """The first test that fails, `SURVIVED`, or None if it is not known."""
        return self._found.get(key)

    def add(self, key: str, result: str) -> None:
        """Keep a result."""
        self._found[key] = result
        self._path.parent.mkdir(exist_ok=True)
        temporary = self._path.with_suffix(".part")
        temporary.write_text(json.dumps(self._found, indent=1))
        temporary.replace(self._path)


class Copy:
    """A copy of the working tree and a process that tests it; one request at a time."""

    def __init__(self) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="mutants-")
        Path(self._temporary.name).chmod(0o755)  # some tests act as other users
        self.folder = Path(self._temporary.name) / "tree"
        listed = subprocess.check_output(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, text=True
        )
        for name in filter(None, listed.split("\0")):
            if (source := ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, self.folder / name)
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py"))],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.terminate()  # it ends the tests in progress
        self._server.wait()
        self._temporary.cleanup()

    @contextmanager
    def broken(self, package: Package, mutant: Mutant) -> Iterator[None]:
        """The copy with a mutant during a `with` block."""
        path = package.source(mutant, self.folder)
        whole = path.read_text()
        self._write(path, whole.replace(mutant.text, mutant.broken))
        try:
            yield
        finally:
            self._write(path, whole)

    def first_failure(self, tests: Sequence[str], select: str) -> str:
        """The test that fails first, or `SURVIVED`.

        Raises:
            RuntimeError: pytest could not run the tests.
        """
        output = self.folder.parent / "output"
        options = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            *(["-k", select] if select else []),
        ]
        request = {
            "folder": str(self.folder), "arguments": [*options, *tests], "output": str(output),
            "seconds": LIMIT_SECONDS,
        }  # fmt: skip
        assert self._server.stdin is not None  # noqa: S101  both are pipes
        assert self._server.stdout is not None  # noqa: S101
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        code = json.loads(self._server.stdout.readline())
        if code is None:
            return f"no end in {LIMIT_SECONDS} s"
        text = output.read_text(errors="replace")
        failed = re.search(
            r"^(?:FAILED|ERROR) (?:\S*/)?(test_\w+\.py(?:::.+?)?)(?: - .*)?$", text, re.MULTILINE
        )
        if code == 0:
            return SURVIVED
        if failed is None or code not in _ENDED | {2}:  # 2: a test file could not be imported
            raise RuntimeError(f"pytest ended with {code} and names no test:\n{text[-3000:]}")
        return failed[1]

    @staticmethod
    def _write(path: Path, text: str) -> None:
        path.write_text(text)
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()  # Python tells versions apart by the second and the size


def run(
    jobs: Sequence[Job], findings: Findings, say: Callable[[str], None], pause_while: Path | None = None
) -> list[str]:
    """Run mutants with equal tests together, the tests on the whole copy first; adds results as they come.

    Starts no test while the file `pause_while` exists, as while something is measured on this machine.

    Returns:
        Tests that fail on the code as it is, so that they say nothing of a mutant; theirs were not run.
    """
    batches: dict[tuple[tuple[str, ...], str], list[Job]] = {}
    for job in jobs:
        batches.setdefault((job.mutant.tests, job.package.select), []).append(job)
    progress = _Progress(findings, say, len(jobs), pause_while)
    copies: SimpleQueue[Copy] = SimpleQueue()
    with ExitStack() as opened:
        pool = ThreadPoolExecutor(PROCESSES)
        opened.callback(pool.shutdown, cancel_futures=True)  # after the copies are closed, when interrupted
        for _ in range(PROCESSES):
            copies.put(opened.enter_context(Copy()))

        def on_a_copy(batch: list[Job]) -> str:
            copy = copies.get()
            try:
                return _run_batch(copy, batch, progress)
            finally:
                copies.put(copy)

        return list(filter(None, pool.map(on_a_copy, batches.values())))


class _Progress:
    """Counts and keeps results of both processes."""

    def __init__(
        self, findings: Findings, say: Callable[[str], None], total: int, pause_while: Path | None
    ) -> None:
        self._findings, self._say, self._total, self._pause_while = findings, say, total, pause_while
        self._done, self._lock = 0, Lock()

    def add(self, job: Job, result: str, seconds: float) -> None:
        """A result, and how long its tests took."""
        with self._lock:
            self._done += 1
            self._findings.add(job.key, result)
            self._say(f"[{self._done}/{self._total}] {job.name}: {result or 'SURVIVED'} ({seconds:.0f} s)")

    def wait(self) -> None:
        """Return when nothing is measured."""
        while self._pause_while is not None and self._pause_while.exists():
            time.sleep(_PAUSE_SECONDS)


def _run_batch(copy: Copy, batch: Sequence[Job], progress: _Progress) -> str:
    """Run mutants that have the same tests; returns the test that fails on the whole copy, or nothing."""
    tests, select = batch[0].mutant.tests, batch[0].package.select
    progress.wait()
    if failure := copy.first_failure(tests, select):
        return failure
    for job in batch:
        progress.wait()
        began = time.monotonic()
        with copy.broken(job.package, job.mutant):
            result = copy.first_failure(tests, select)
        progress.add(job, result, time.monotonic() - began)
    return ""
