"""Asks two checkouts the same questions, by `KFAC` and `KFACConfig` as commit d331c44 had them.

git worktree add ../before d331c44
python -m jobs.experiments.on_other_models ../before results/core/on_other_models.csv
"""

from __future__ import annotations

import csv
import importlib
import json
import subprocess
import sys
from pathlib import Path

import torch

import tests.kfac_core.architectures  # noqa: F401  those of this checkout, whichever is asked

NOW = Path(__file__).parents[3]
QUESTIONS = "coverage", "fisher", "mistakes", "large_and_slow", "ranks"


def main(before: Path, path: Path) -> None:
    """Write one row a question, with both answers."""
    first, second = (_asked(checkout) for checkout in (before, NOW))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("question", "before", "now"))
        writer.writerows((question, first[question], second[question]) for question in second)


def _asked(checkout: Path) -> dict[str, str]:
    command = [sys.executable, "-W", "ignore", "-m", __package__, "--on", str(checkout.resolve())]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=NOW)
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


def _answer(checkout: str) -> None:
    """Print the answers of the `kfac_core` in a checkout."""
    sys.path.insert(0, checkout)
    torch.set_num_threads(1)
    found = {}
    for name in QUESTIONS:
        module = importlib.import_module(f"{__package__}.{name}")
        for question, answer in module.answers():
            print(f"{question}: {answer}", file=sys.stderr, flush=True)
            found[question] = answer
    kfac_core = importlib.import_module("kfac_core")
    if not Path(str(kfac_core.__file__)).is_relative_to(checkout):
        raise SystemExit(f"asked {kfac_core.__file__} in the place of {checkout}")
    print(json.dumps(found))


if __name__ == "__main__":
    if sys.argv[1] == "--on":
        _answer(sys.argv[2])
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
