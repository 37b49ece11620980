"""The verbs that act on runs: submit, run, status, logs, cancel, retry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from harness.cell import Cell
    from harness.study.status import CellStatus
    from harness.study.submit import Submission

_File = Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="The sweep file.")]
_FileOrNone = Annotated[
    Path | None, typer.Option("--file", "-f", metavar="FILE", help="The sweep's file, in place of its name.")
]
_Sweep = Annotated[str | None, typer.Argument(help="Name of the sweep.", show_default=False)]
_Site = Annotated[str, typer.Option(metavar="NAME", help="Site profile: a name, or a path to a .yaml file.")]
_Runs = Annotated[Path, typer.Option(metavar="DIR", help="Where runs are stored.")]
_Where = Annotated[
    str | None, typer.Option(metavar="EXPR", help="Only matching cells: 'method=sgd and seed in 0,1'.")
]
_Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override: training.epochs=5.")
]
_Budget = Annotated[
    float | None, typer.Option(metavar="HOURS", min=0, help="Refuse what could cost more GPU- or core-hours.")
]
_Json = Annotated[bool, typer.Option("--json", help="For programs.")]
_RUNS = Path("results/runs")
_INTERRUPTED = 130  # 128 + SIGINT, as shells count


def register(app: typer.Typer) -> None:
    """Add the verbs to `app`."""
    app.command(epilog="Example: kronscale submit -f jobs/sweeps/demo.yaml")(submit)
    app.command(epilog="Example: kronscale run -f jobs/sweeps/demo.yaml --where seed=0")(run)
    app.command(epilog="Example: kronscale status demo --where 'world_size>=2'")(status)
    app.command(epilog="Example: kronscale logs sgd-p2-s0 --rank 1")(logs)
    app.command(epilog="Example: kronscale cancel demo --where method=sgd")(cancel)
    app.command(epilog="Example: kronscale retry demo")(retry)


def submit(
    file: _File, site: _Site = "local", runs: _Runs = _RUNS, where: _Where = None, set_: _Set = None,
    as_json: _Json = False, budget: _Budget = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be handed over.")] = False,
) -> None:  # fmt: skip
    """Start every cell that was never tried, in the background; safe to repeat."""
    cells = _cells(None, file, set_, where, runs)
    if dry_run:
        _say_preview(cells, site, runs, budget)
        return
    done = _submit(cells, site, runs, budget)
    if as_json:
        groups = ("new", "already_done", "in_flight", "failed_before")
        typer.echo(json.dumps({name: [cell.id for cell in getattr(done, name)] for name in groups}, indent=1))
        return
    _say_submission(done)


def run(
    file: _File, site: _Site = "local", runs: _Runs = _RUNS, where: _Where = None, set_: _Set = None,
    budget: _Budget = None,
) -> None:  # fmt: skip
    """Submit, and watch until everything has ended; Ctrl-C stops only the watching."""
    cells = _cells(None, file, set_, where, runs)
    _say_submission(_submit(cells, site, runs, budget))
    _follow(cells, runs)


def status(
    sweep: _Sweep = None, file: _FileOrNone = None, runs: _Runs = _RUNS, where: _Where = None,
    set_: _Set = None, as_json: _Json = False,
    watch: Annotated[bool, typer.Option("--watch", help="Stay until everything has ended.")] = False,
) -> None:  # fmt: skip
    """Show what state every cell is in, and why cells failed; without a sweep, of all sweeps."""
    from harness.cli.cell_selection import stored_names  # noqa: PLC0415  # --help answers before these are loaded
    from harness.cli.status_view import print_statuses  # noqa: PLC0415
    from harness.runs.arms import differences  # noqa: PLC0415

    if watch:
        _follow(_cells(sweep, file, set_, where, runs), runs)
        return
    names = [sweep] if sweep or file else stored_names(runs)
    seen = {name: _look(_cells(name, file, set_, where, runs), runs) for name in names}
    if as_json:
        rows = []
        for statuses in seen.values():
            differs = differences([one.cell for one in statuses])
            rows += [{**one.to_dict(), "differs": differs[one.cell.id]} for one in statuses]
        typer.echo(json.dumps(rows, indent=1))
        return
    if not seen:
        typer.echo(f"no runs under {runs}; start some with kronscale submit -f jobs/sweeps/demo.yaml")
    for statuses in seen.values():
        print_statuses(statuses, runs)


def logs(
    cell: Annotated[
        str, typer.Argument(metavar="CELL", help="Beginning of the cell's id.", show_default=False)
    ],
    rank: Annotated[int | None, typer.Option(min=0, help="Default: the cause of a failure, or 0.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Stay until it ends.")] = False,
    runs: _Runs = _RUNS,
) -> None:
    """Print what a rank of a cell's newest attempt wrote to its standard output and error."""
    from harness.cli.cell_selection import stored_cell  # noqa: PLC0415  # see status
    from harness.cli.status_view import print_log  # noqa: PLC0415

    print_log(stored_cell(cell, runs), rank, follow=follow)


def cancel(
    sweep: _Sweep = None, file: _FileOrNone = None, runs: _Runs = _RUNS, where: _Where = None,
    set_: _Set = None,
    checkpoint: Annotated[
        bool, typer.Option("--checkpoint", help="Save one first, where a retry goes on.")
    ] = False,
) -> None:  # fmt: skip
    """End pending and running cells; returns when they have ended."""
    from harness.study.submit import cancel as cancel_cells  # noqa: PLC0415  # see status

    ended = cancel_cells(_cells(sweep, file, set_, where, runs), runs, checkpoint=checkpoint)
    typer.echo(f"{_count(ended)} cancelled" if ended else "nothing to cancel: no cell is pending or running")


def retry(
    sweep: _Sweep = None, file: _FileOrNone = None, site: _Site = "local", runs: _Runs = _RUNS,
    where: _Where = None, set_: _Set = None, budget: _Budget = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="From the start, whatever was saved.")] = False,
) -> None:  # fmt: skip
    """Give cells that failed, timed out, were preempted, lost or cancelled another attempt.

    It runs in the background, and goes on from the newest checkpoint if there is one.
    """
    from harness.launchers.site_profiles import read_site  # noqa: PLC0415  # see status
    from harness.study.submit import retry as retry_cells  # noqa: PLC0415

    cells = _cells(sweep, file, set_, where, runs)
    again = retry_cells(cells, read_site(site), runs, fresh=fresh, budget=budget)
    typer.echo(f"{_count(again)} submitted again" if again else "nothing to retry: no cell failed")


def _cells(
    sweep: str | None, file: Path | None, overrides: list[str] | None, where: str | None, runs: Path
) -> list[Cell]:
    from harness.cli.cell_selection import chosen_cells  # noqa: PLC0415  # see status

    return chosen_cells(sweep, file, overrides or (), where, runs)


def _look(cells: Sequence[Cell], runs: Path) -> list[CellStatus]:
    from harness.runs.store import sweep_folder  # noqa: PLC0415
    from harness.study.status import read_statuses  # noqa: PLC0415  # see status

    return read_statuses(sweep_folder(cells[0].sweep, runs), cells) if cells else []


def _say_preview(cells: Sequence[Cell], site: str, runs: Path, budget: float | None) -> None:
    from harness.launchers.site_profiles import read_site  # noqa: PLC0415  # see status
    from harness.study.submit import preview  # noqa: PLC0415

    seen = preview(cells, read_site(site), runs)
    if seen.text:
        typer.echo(seen.text)
    typer.echo(f"{_count(seen.new)} would be submitted, {seen.cost}", err=True)
    seen.cost.refuse_beyond(budget)


def _submit(cells: Sequence[Cell], site: str, runs: Path, budget: float | None) -> Submission:
    from harness.launchers.site_profiles import read_site  # noqa: PLC0415  # see status
    from harness.study.submit import submit as submit_cells  # noqa: PLC0415

    return submit_cells(cells, read_site(site), runs, budget=budget)


def _say_submission(done: Submission) -> None:
    parts = ((done.already_done, "completed already"), (done.in_flight, "pending or running already"))
    said = [f"{_count(cells)} {what}" for cells, what in parts if cells]
    first = f"{_count(done.new)} submitted" if done.new else "nothing to do"
    typer.echo(": ".join([first, "; ".join(said)]) if said else first)
    if done.failed_before:
        typer.echo(f"{_count(done.failed_before)} failed before and stay so; kronscale retry reruns them")


def _follow(cells: Sequence[Cell], runs: Path) -> None:
    from harness.cli.output import console  # noqa: PLC0415  # see status
    from harness.cli.status_view import print_statuses  # noqa: PLC0415
    from harness.study.progress import follow  # noqa: PLC0415

    try:
        last = follow(lambda: _look(cells, runs), console())
    except KeyboardInterrupt:
        name = cells[0].sweep
        name += "" if runs == _RUNS else f" --runs {runs}"
        typer.echo(f"detached: runs go on; kronscale status {name} shows, kronscale cancel {name} ends them")
        raise typer.Exit(_INTERRUPTED) from None
    print_statuses(last, runs)
    if any(one.state != "COMPLETED" for one in last):
        raise typer.Exit(1)


def _count(cells: Sequence[Any]) -> str:
    return f"{len(cells)} {'cell' if len(cells) == 1 else 'cells'}"
