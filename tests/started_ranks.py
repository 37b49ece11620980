"""What starts ranks in a test: commands of launchers, and new interpreters of multiprocessing."""

from __future__ import annotations

import multiprocessing.process
import sys
from collections.abc import Sequence
from typing import Any

STARTERS = (
    "harness.training.worker", "harness.launchers", "harness.bench", "fake_rank.py",
    "mpiexec", "sbatch", "srun",
)  # fmt: skip
RUNNING = {"run", "submit", "retry", "reproduce", "doctor"}
"""Commands of `kronscale` that start ranks, unless they fail before."""

seen: list[str] = []
"""What the test has started so far."""


def starts_ranks(words: Sequence[str]) -> bool:
    """Whether this command line starts ranks, or a launcher that does."""
    if any(starter in word for word in words[:4] for starter in STARTERS):
        return True
    return "harness.cli" in words and bool(RUNNING & set(words)) and not {"--help", "--dry-run"} & set(words)


def watch() -> None:
    """Note from now on what this process starts."""
    sys.addaudithook(_note_command)
    start = multiprocessing.process.BaseProcess.start

    def noted(process: multiprocessing.process.BaseProcess) -> None:
        if getattr(process, "_start_method", "") in ("spawn", "forkserver"):  # a fork is cheap
            seen.append(f"{process.name} of multiprocessing")
        start(process)

    multiprocessing.process.BaseProcess.start = noted  # type: ignore[method-assign]


def _note_command(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        words = arguments[1]
        words = [str(word) for word in words] if isinstance(words, (list, tuple)) else [str(words)]
        if starts_ranks(words):
            seen.append(" ".join(words)[:200])
