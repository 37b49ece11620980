"""`kronscale bench`: what the parts cost on this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

_MODELS = {
    "resnet32": 128,
    "resnet50": 8,
}  # with the batch of a rank; kept in step with harness.bench.subject


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    verbs = typer.Typer(help="Measure what the parts cost on this machine.", no_args_is_help=True)
    verbs.command(epilog="Example: kronscale bench core --model resnet32 --ranks 2 --strategy mem_opt")(core)
    verbs.callback()(_group)
    app.add_typer(verbs, name="bench")


def _group() -> None:
    """Keeps `core` a word of its own while it is the only benchmark."""


def core(
    model: Annotated[str, typer.Option(help="resnet32 (32x32 images) or resnet50 (64x64).")] = "resnet32",
    batch: Annotated[int | None, typer.Option(help="Examples of each rank. Default: 128 or 8.")] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes on this machine.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each.")] = 1,
    strategy: Annotated[str, typer.Option(help="Distribution strategy.")] = "comm_opt",
    solver: Annotated[str, typer.Option(help="eigen, inverse or inverse_pi.")] = "eigen",
    settings: Annotated[
        str, typer.Option("--set", metavar="JSON", help="More settings of KFACConfig, as a JSON object.")
    ] = "{}",
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 7,
    out: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all figures there.")
    ] = None,
) -> None:
    """Time every phase of a K-FAC step against plain forward + backward in the same run, and its floor."""
    from harness.bench.core import CoreBench  # noqa: PLC0415  --help does not wait for it
    from harness.cli.screen import console  # noqa: PLC0415
    from kfac_core.config import KFACConfig  # noqa: PLC0415

    if model not in _MODELS:
        raise UserError(f"--model {model!r} is not one of {', '.join(_MODELS)}")
    kfac = {"strategy": strategy, "solver": solver, **_settings(settings)}
    try:
        KFACConfig(**kfac)
    except TypeError as error:
        raise UserError(f"--set: {error}") from None
    screen = console()
    cores = len(os.sched_getaffinity(0))
    if ranks * threads > cores:
        screen.print(f"note: {ranks} x {threads} threads share {cores} CPUs: read ratios only", style="dim")
    figures = CoreBench(model, batch or _MODELS[model], ranks, threads, kfac, repeats).run()
    screen.print(_table(figures))
    for line in _lines(figures):
        screen.print(line, highlight=False)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(figures, indent=1) + "\n")


def _settings(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--set {text!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"--set {text!r} is no JSON object")
    return found


def _table(figures: dict[str, Any]) -> Table:
    from rich.table import Table  # noqa: PLC0415

    table = Table("phase", title="Percent of plain forward + backward, by kind of step", title_justify="left")
    for name in ("full", "factor", "plain", "full, ms", "floor, ms", "of floor", "collectives"):
        table.add_column(name, justify="right")
    for phase, row in figures["phases"].items():
        seconds, floor, fraction = row["seconds"], row["floor_seconds"], row["fraction_of_floor"]
        table.add_row(
            phase,
            *(f"{100 * row['of_sgd'][kind]:.1f}" for kind in ("full", "factor", "plain")),
            f"{1e3 * seconds['median']:.2f} [{1e3 * seconds['low']:.2f}, {1e3 * seconds['high']:.2f}]",
            f"{1e3 * floor:.2f}" if floor else "",
            f"{100 * fraction:.0f} %" if fraction else "",
            str(figures["calls"].get(phase, "")),
        )
    return table


def _lines(figures: dict[str, Any]) -> list[str]:
    sgd, rates = figures["sgd"], figures["rates"]
    ratios = ", ".join(f"{name}: {value:.3f}x" for name, value in figures["ratios"].items())
    state = [sum(memory.values()) - memory["peak_extra"] for memory in figures["memory"]]
    growth = [memory["peak_extra"] for memory in figures["memory"]]
    megabytes = (f"{own / 2**20:.1f} ({peak / 2**20:.1f})" for own, peak in zip(state, growth, strict=True))
    link = f", link {rates['link_bytes'] / 1e9:.2f} GB/s" if rates["link_bytes"] else ""
    low, median, high = (1e3 * sgd[name] for name in ("low", "median", "high"))
    return [
        f"plain forward + backward: {median:.0f} ms [{low:.0f}, {high:.0f}]",
        f"iteration at factor/inverse intervals {ratios}; without updates {figures['plain_ratio']:.3f}x",
        f"K-FAC state (growth of the largest resident set) by rank, MiB: {', '.join(megabytes)}",
        f"machine: products {rates['flops'] / 1e9:.0f} GFLOP/s, copies {rates['copy_bytes'] / 1e9:.1f} GB/s"
        + link,
    ]
