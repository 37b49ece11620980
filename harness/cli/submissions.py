"""What `submit`, `run` and `retry` do and print."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from harness.cell import Cell
from harness.cli.cost_consent import cost_in_words, with_consent
from harness.cli.output import print_note
from harness.errors import UserError
from harness.launchers.site_profile import Site
from harness.runs.commands import command
from harness.runs.run_place import has_native_bfloat16
from harness.runs.store import sweep_folder
from harness.study.site_choice import chosen_site
from harness.study.start_cells import Terms
from harness.study.submit import Preview, Submission, preview, retry, submit


def site_for(cells: Sequence[Cell], name: str | None, runs: Path, oversubscribe: float | None) -> Site:
    """The site that a command uses for cells of one sweep.

    Args:
        cells: at least one.
        name: of the command line or KRONSCALE_SITE, if any.
        runs: folder of stored runs.
        oversubscribe: of the command line, if any.
    """
    if not cells:
        raise UserError(
            "none of these cells can be read by this version of Kronscale: submit the sweep's file"
        )
    site = chosen_site(name, sweep_folder(cells[0].sweep, runs))
    if oversubscribe is None:
        return site
    if site.launcher != "local":
        raise UserError(f"--oversubscribe has no effect on site {site.name}, which is not this host")
    return site.model_copy(update={"oversubscribe": True, "oversubscribe_limit": oversubscribe})


def bfloat16_note(cells: Sequence[Cell], site: Site) -> str:
    """A sentence if cells would compute in bfloat16 on this host's CPUs, which have to emulate it."""
    slow = [cell for cell in cells if cell.training.precision == "bfloat16"]
    if not slow or site.launcher != "local" or site.gpus_per_rank or has_native_bfloat16() is not False:
        return ""
    return (
        f"{count(slow)} with training.precision=bfloat16: this host's CPUs emulate bfloat16, so a step takes "
        "several times as long as in float32"
    )


def start(cells: Sequence[Cell], site: Site, runs: Path, budget: float | None, *, yes: bool) -> Submission:
    """Submit cells, after asking where they could cost much."""
    return with_consent(
        lambda budget, ask: submit(cells, site, runs, budget=budget, ask=ask), budget, yes=yes
    )


def start_again(
    cells: Sequence[Cell],
    site: Site,
    runs: Path,
    budget: float | None,
    *,
    fresh: bool,
    change_site: bool,
    repeat: bool,
    yes: bool,
) -> None:
    """Give cells another attempt, after asking where that could cost much; completed ones with `repeat`."""
    done = with_consent(
        lambda budget, ask: retry(
            cells, site, runs, budget=budget, fresh=fresh, change_site=change_site, repeat=repeat, ask=ask
        ),
        budget,
        yes=yes,
    )
    typer.echo(f"{count(done.new)} submitted again" if done.new else "nothing to retry: no cell failed")
    _print_cost(done, site)


def print_submission(done: Submission, site: Site, name: str | None, runs: Path) -> None:
    """Print what was submitted where, and what was not."""
    groups = ((done.already_done, "completed already"), (done.in_flight, "pending or running already"))
    parts = [f"{count(cells)} {what}" for cells, what in groups if cells]
    first = f"{count(done.new)} submitted" if done.new else "nothing to do"
    typer.echo(": ".join([first, "; ".join(parts)]) if parts else first)
    _print_cost(done, site)
    if done.failed_before:
        folder = sweep_folder(done.failed_before[0].sweep, runs).path
        again = command("retry", folder, site=name or "local")
        typer.echo(f"{count(done.failed_before)} failed before; to start them again: {again}")


def print_preview(cells: Sequence[Cell], site: Site, runs: Path, budget: float | None) -> None:
    """Print what `submit` would submit; refuses what it would refuse."""
    _print_text(preview(cells, site, runs), "submitted", site, budget)


def print_retry_preview(
    cells: Sequence[Cell],
    site: Site,
    runs: Path,
    budget: float | None,
    *,
    fresh: bool,
    change_site: bool,
    repeat: bool,
) -> None:
    """Print what `retry` would submit, and from which attempt each cell would continue."""
    terms = Terms(resume=not (fresh or repeat), change_site=change_site)
    would_be = preview(cells, site, runs, again=True, repeat=repeat, terms=terms)
    for cell in would_be.new:
        attempt = would_be.continued.get(cell.id)
        how = "from the beginning" if attempt is None else f"continues attempt {attempt.number}"
        typer.echo(f"{cell.id}: {how}", err=True)
    _print_text(would_be, "submitted again", site, budget)


def count(cells: Sequence[Any]) -> str:
    """Such as `1 cell` or `3 cells`."""
    return f"{len(cells)} {'cell' if len(cells) == 1 else 'cells'}"


def _print_text(would_be: Preview, what: str, site: Site, budget: float | None) -> None:
    if would_be.text:
        typer.echo(would_be.text)
    print_note(bfloat16_note(would_be.new, site))
    cost = f": {cost_in_words(would_be.cost, would_be.expected)}" if would_be.new else ""
    typer.echo(f"{count(would_be.new)} would be {what} to site {site.name}{cost}", err=True)
    would_be.cost.refuse_beyond(budget)


def _print_cost(done: Submission, site: Site) -> None:
    print_note(bfloat16_note(done.new, site))
    if done.new:
        typer.echo(f"site {site.name}: {cost_in_words(done.cost, done.expected)}")
