"""`python -m harness.bench core` and `gpu`: what a K-FAC step costs here, beside plain training."""

from __future__ import annotations

import argparse
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from harness.bench.core import KINDS, CoreBench
from harness.errors import UserError
from kfac_core.config import KFACConfig
from kfac_core.errors import ConfigError

_MODELS = {"resnet32": 128, "resnet50": 8}
"""Models of `harness.bench.replica` with their default batch per rank, repeated here to load no torch."""


def main(arguments: list[str] | None = None) -> int:
    """Read the command line, measure and print; returns the exit code."""
    given = _parser().parse_args(arguments)
    try:
        return int(given.run(given))
    except (ConfigError, TypeError, UserError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _core(given: argparse.Namespace) -> int:
    kfac = {"strategy": given.strategy, "solver": given.solver, **_settings(given.set)}
    KFACConfig(**kfac)
    batch = given.batch or _MODELS[given.model]
    figures = CoreBench(given.model, batch, given.ranks, given.threads, kfac, given.repeats).run()
    _print(figures)
    if given.json is not None:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def _gpu(given: argparse.Namespace) -> int:
    """0: everything is measured; 3: the same command has to go on."""
    from harness.bench.gpu import GPUBench  # noqa: PLC0415  loads torch

    peers = {name: str(getattr(given, name)) for name in ("gpauloski", "lzhangbv") if getattr(given, name)}
    done = GPUBench(given.device, given.minutes, given.out, peers).run(partial(print, flush=True))
    return 0 if done else 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m harness.bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="core|gpu")
    core = commands.add_parser("core", description="Phases of a step on the CPUs of this machine.")
    core.set_defaults(run=_core)
    core.add_argument("--model", choices=_MODELS, default="resnet32", help="32x32 or 64x64 images")
    core.add_argument("--batch", type=_count, help="examples per rank; by default 128 or 8")
    core.add_argument("--ranks", type=_count, default=1, help="processes on this host")
    core.add_argument("--threads", type=_count, default=1, help="threads per rank")
    core.add_argument("--strategy", default="comm_opt", help="distribution strategy")
    core.add_argument("--solver", default="eigen", help="eigen, inverse or inverse_pi")
    core.add_argument("--set", default="{}", metavar="JSON", help="more fields of KFACConfig")
    core.add_argument("--repeats", type=_count, default=7, help="measured rounds")
    core.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to this file")
    gpu = commands.add_parser(
        "gpu", description="ResNet-32, ResNet-50 and BERT on one GPU; goes on if repeated."
    )
    gpu.set_defaults(run=_gpu)
    gpu.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu rehearses, on small networks"
    )
    gpu.add_argument(
        "--minutes", type=float, default=9.0, help="what has not begun by then is left for later"
    )
    gpu.add_argument("--out", type=Path, default=Path("results/gpu"), help="folder of the results")
    gpu.add_argument("--gpauloski", type=Path, help="checkout of gpauloski/kfac-pytorch, to measure beside")
    gpu.add_argument("--lzhangbv", type=Path, help="checkout of lzhangbv/kfac_pytorch, to measure beside")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def _settings(text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--set must be JSON, got {text!r}: {error}") from None
    if not isinstance(settings, dict):
        raise UserError(f"--set must be a JSON object, got {text!r}")
    return settings


def _print(figures: dict[str, Any]) -> None:
    screen = Console(highlight=False)
    table = Table(title="Percent of plain forward + backward, by kind of step", title_justify="left")
    table.add_column("phase")
    for column in (*KINDS, "full, ms", "collectives"):
        table.add_column(column, justify="right")
    for phase, row in figures["phases"].items():
        shares = (f"{100 * row['of_sgd'][kind]:.1f}" for kind in KINDS)
        table.add_row(phase, *shares, _milliseconds(row["seconds"]), str(figures["calls"].get(phase, "")))
    screen.print(table)
    ratios = ", ".join(f"{name}: {value:.3f}x" for name, value in figures["ratios"].items())
    memory = ", ".join(
        f"{(sum(own.values()) - own['peak_extra']) / 2**20:.1f} ({own['peak_extra'] / 2**20:.1f})"
        for own in figures["memory"]
    )
    screen.print(f"plain forward + backward, ms: {_milliseconds(figures['sgd'])}")
    screen.print(
        f"iteration at factor/inverse intervals {ratios}; without updates {figures['plain_ratio']:.3f}x"
    )
    screen.print(f"K-FAC state (growth of the largest resident set) by rank, MiB: {memory}")
    cores, bench = len(os.sched_getaffinity(0)), figures["bench"]
    if (wanted := bench["ranks"] * bench["threads"]) > cores:
        screen.print(f"{wanted} threads shared {cores} CPUs: only ratios are meaningful")


def _milliseconds(spread: dict[str, float]) -> str:
    return "{median:.2f} [{low:.2f}, {high:.2f}]".format(
        **{name: 1e3 * seconds for name, seconds in spread.items()}
    )


if __name__ == "__main__":
    sys.exit(main())
