"""`kronscale bench`: measures the cost of K-FAC's parts on this host."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.bench_gpu import gpu
from harness.cli.command import Command
from harness.cli.options import JsonFile, Overrides, SweepFile
from harness.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

_MODELS = {"resnet32": 128, "resnet50": 8}
"""Models of `harness.bench.replica` with their default batch per rank, repeated here to load no torch."""

_Model = Annotated[str, typer.Option(help="Model: resnet32 (32x32 images) or resnet50 (64x64).")]
_Batch = Annotated[int | None, typer.Option(help="Examples per rank. Default: 128 or 8.")]
_Threads = Annotated[int, typer.Option(min=1, help="Threads per rank.")]
_CsvFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table to this CSV file.")]


_BY_LAYER = ("factor_compute", "precondition")

commands = typer.Typer(help="Measure the cost of K-FAC's parts on this host.", no_args_is_help=True)


@commands.command(
    cls=Command, epilog="Example: kronscale bench core --model resnet32 --ranks 2 --strategy mem_opt"
)
def core(
    model: _Model = "resnet32",
    batch: _Batch = None,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks: processes on this host.")] = 1,
    threads: _Threads = 1,
    strategy: Annotated[str, typer.Option(help="Distribution strategy.")] = "comm_opt",
    solver: Annotated[str, typer.Option(help="Solver: eigen, inverse or inverse_pi.")] = "eigen",
    settings: Annotated[
        str, typer.Option("--set", metavar="JSON", help="More fields of KFACConfig, as a JSON object.")
    ] = "{}",
    repeats: Annotated[int, typer.Option(min=1, help="Measured rounds.")] = 7,
    by_layer: Annotated[
        bool, typer.Option("--by-layer", help="Also compare each kind of layer with its roofline.")
    ] = False,
    out: JsonFile = None,
) -> None:
    """Time every phase of a K-FAC step, relative to forward + backward and to its roofline."""
    from harness.bench.core import CoreBench  # noqa: PLC0415  slow to load
    from harness.cli.output import console  # noqa: PLC0415
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
        screen.print(
            f"note: {ranks} x {threads} threads share {cores} CPUs: only ratios are meaningful", style="dim"
        )
    figures = CoreBench(model, batch or _MODELS[model], ranks, threads, kfac, repeats).run()
    _print_phases(screen, figures)
    if by_layer:
        _print_layers(screen, figures["layers"])
    for line in _lines(figures):
        screen.print(line, highlight=False)
    _write(out, figures)


@commands.command(
    cls=Command, epilog="Example: kronscale bench instrument --json results/instrument/overhead.json"
)
def instrument(
    model: _Model = "resnet32",
    batch: _Batch = None,
    threads: _Threads = 1,
    pairs: Annotated[int, typer.Option(min=6, help="Pairs of a step with and a step without timer.")] = 40,
    out: JsonFile = None,
    csv: _CsvFile = None,
) -> None:
    """Measure the overhead of the phase timer, from pairs of K-FAC steps with and without it."""
    from harness.bench.instrument import measure  # noqa: PLC0415  slow to load
    from harness.cli.output import console  # noqa: PLC0415

    if model not in _MODELS:
        raise UserError(f"--model {model!r} is not one of {', '.join(_MODELS)}")
    figures = measure(model, batch or _MODELS[model], pairs, threads)
    from statistics import median  # noqa: PLC0415  see core

    on, off = (median(figures[name]) for name in ("on_seconds", "off_seconds"))
    paired, computed = figures["overhead"], figures["computed_overhead"]
    screen = console()
    screen.print(f"one step: {1e3 * off:.1f} ms without timer, {1e3 * on:.1f} ms with it", highlight=False)
    limits = f"[{paired['low']:.2%}, {paired['high']:.2%}]"
    screen.print(f"overhead, median of {pairs} pairs: {paired['median']:.2%} {limits}", highlight=False)
    entries, cost = figures["entries_per_step"], 1e6 * figures["seconds_per_entry"]
    screen.print(f"computed: {entries} entries of {cost:.2f} µs, {computed:.3%}", highlight=False)
    row = {name: figures[name] for name in ("model", "batch", "threads", "pairs")}
    row |= {"on_seconds_median": on, "off_seconds_median": off}
    row |= {f"overhead_{name}": value for name, value in paired.items()}
    row |= {name: figures[name] for name in ("entries_per_step", "seconds_per_entry", "computed_overhead")}
    _write(out, figures, csv, [row])


@commands.command(
    cls=Command,
    epilog="Example: kronscale bench ablation -f jobs/sweeps/demo.yaml "
    "--where 'method=comm_opt and world_size=2 and seed=0'",
)
def ablation(
    file: SweepFile,
    where: Annotated[
        list[str] | None, typer.Option(metavar="EXPR", help="Filter that selects one cell with K-FAC.")
    ] = None,
    set_: Overrides = None,
    threads: _Threads = 1,
    rounds: Annotated[
        int, typer.Option(min=6, help="Rounds per phase, of four or five inverse intervals each.")
    ] = 30,
    out: JsonFile = None,
    csv: _CsvFile = None,
) -> None:
    """Time a cell's steps with each phase omitted in turn, and compare with the phase timer."""
    from harness.bench.ablation import AblationBench  # noqa: PLC0415  slow to load
    from harness.cli.cell_selection import selected_cells  # noqa: PLC0415
    from harness.cli.output import console  # noqa: PLC0415

    cells = [
        cell for cell in selected_cells(None, file, set_ or (), where or (), Path()) if cell.kfac is not None
    ]
    if len(cells) != 1:
        some = ", ".join(cell.id for cell in cells[:3]) or "none"
        raise UserError(f"--where must select one cell with K-FAC, got {len(cells)}: {some}")
    (cell,) = cells
    figures = AblationBench(cell.model_dump_json(), cell.world_size, threads, rounds).run()
    _print_ablation(console(), cell.id, figures["phases"])
    _write(out, figures, csv, [_ablation_row(cell.id, rounds, *item) for item in figures["phases"].items()])


commands.command(cls=Command, epilog="Example: kronscale bench gpu --device cpu --parts timer")(gpu)


def _print_ablation(screen: Console, cell: str, phases: dict[str, Any]) -> None:
    from harness.cli.output import figure_table  # noqa: PLC0415

    title = f"{cell}: milliseconds per step, median over rounds and its 95 % limits"
    columns = ("phase", "timer", "omitted", "twice", "of the step", "agree")
    table = figure_table(title, columns, "phase", lined=True)
    for phase, row in phases.items():
        intervals = (
            f"{1e3 * one['median']:.3f} [{1e3 * one['low']:.3f}, {1e3 * one['high']:.3f}]"
            for one in (row["timer"], row["ablation"], row["doubling"])
        )
        share = row["timer"]["median"] / row["step_seconds"]
        agree = "yes" if row["alone"] else "between" if row["agree"] else "no"
        table.add_row(phase, *intervals, f"{share:.1%}", agree)
    screen.print(table)


def _ablation_row(cell: str, rounds: int, phase: str, found: dict[str, Any]) -> dict[str, Any]:
    row = {"cell": cell, "phase": phase, "rounds": rounds, "step_seconds": found["step_seconds"]}
    for way in ("timer", "ablation", "doubling", "elsewhere"):
        row |= {f"{way}_{name}_seconds": found[way][name] for name in ("median", "low", "high")}
    return row | {name: "yes" if found[name] else "no" for name in ("alone", "agree")}


def _write(
    out: Path | None, figures: dict[str, Any], csv: Path | None = None, rows: Sequence[dict[str, Any]] = ()
) -> None:
    """Write figures as JSON and rows with equal keys as CSV."""
    lines = [list(rows[0]) if rows else []]
    lines += [[f"{one:.6g}" if isinstance(one, float) else str(one) for one in row.values()] for row in rows]
    table = "".join(",".join(line) + "\n" for line in lines)
    for path, text in ((out, json.dumps(figures, indent=1) + "\n"), (csv, table)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def _settings(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"--set must be JSON, got {text!r}: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"--set must be a JSON object, got {text!r}")
    return found


def _print_phases(screen: Console, figures: dict[str, Any]) -> None:
    from harness.cli.output import figure_table  # noqa: PLC0415

    title, kinds = "Percent of plain forward + backward, by kind of step", ("full", "factor", "plain")
    columns = ("phase", *kinds, "full, ms", "roofline, ms", "of roofline", "collectives")
    table = figure_table(title, columns, "phase", lined=True)
    for phase, row in figures["phases"].items():
        seconds, bound, fraction = row["seconds"], row["floor_seconds"], row["fraction_of_floor"]
        table.add_row(
            phase,
            *(f"{100 * row['of_sgd'][kind]:.1f}" for kind in kinds),
            f"{1e3 * seconds['median']:.2f} [{1e3 * seconds['low']:.2f}, {1e3 * seconds['high']:.2f}]",
            f"{1e3 * bound:.2f}" if bound else "",
            f"{100 * fraction:.0f} %" if fraction else "",
            str(figures["calls"].get(phase, "")),
        )
    screen.print(table)


def _print_layers(screen: Console, kinds: list[dict[str, Any]]) -> None:
    from harness.cli.output import figure_table  # noqa: PLC0415

    columns = [name for phase in _BY_LAYER for name in (f"{phase}, ms", "roofline, ms", "of roofline")]
    head = ("gradient", "layers")
    table = figure_table("One layer of each kind, rank 0", [*head, *columns], *head, lined=True)
    for kind in kinds:
        cells = [f"{kind['shape'][0]} x {kind['shape'][1]}", str(kind["count"])]
        for phase in _BY_LAYER:
            if row := kind.get(phase):
                cells += [f"{1e3 * row[name]:.3f}" for name in ("seconds", "floor_seconds")]
                cells.append(f"{row['fraction_of_floor']:.0%}")
            else:
                cells += [""] * 3
        table.add_row(*cells)
    screen.print(table)


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
        f"host: products {rates['flops'] / 1e9:.0f} GFLOP/s (BLAS alone {rates['blas_flops'] / 1e9:.0f}), "
        f"copies {rates['copy_bytes'] / 1e9:.1f} GB/s{link}",
    ]
