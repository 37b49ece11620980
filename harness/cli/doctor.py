"""`kronscale doctor`: whether a site is fit for a study."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.text import Text

    from harness.doctor.examine import Examination


def register(app: typer.Typer) -> None:
    """Add the verb to `app`."""
    app.command(epilog="Example: kronscale doctor --site slurm-test --runs results/runs")(doctor)


def doctor(
    site: Annotated[
        str, typer.Option(metavar="NAME", help="Site profile: a name, or a path to a .yaml file.")
    ] = "local",
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Where runs are stored.")] = Path("results/runs"),
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Default: two on each of two nodes, or two here.")
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="For the ranks to start and end.")
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Check a site before anyone spends hours on it: this host, and one small job; exits 1 on a fault."""
    from harness.doctor.examine import examine  # noqa: PLC0415  --help does not wait for it
    from harness.doctor.findings import any_fault  # noqa: PLC0415
    from harness.launchers.site_profiles import read_site  # noqa: PLC0415

    seen = examine(read_site(site), runs, ranks, wait, _say)
    if as_json:
        typer.echo(json.dumps({"site": site, "runs": str(runs), **_in_json(seen)}, indent=1))
    else:
        _print(seen)
    if any_fault(seen.findings):
        raise typer.Exit(1)


def _say(words: str) -> None:
    typer.echo(f"{time.strftime('%H:%M:%S')} {words}", err=True)


def _in_json(seen: Examination) -> dict[str, object]:
    return {
        "findings": [asdict(one) for one in seen.findings],
        "reports": [asdict(one) for one in seen.reports],
        "kept": str(seen.kept) if seen.kept is not None else None,
    }


def _print(seen: Examination) -> None:
    from rich.table import Table  # noqa: PLC0415  see doctor

    from harness.cli.output import console  # noqa: PLC0415

    table = Table(box=None, pad_edge=False)
    for heading, share in (("check", None), ("state", None), ("found", 1), ("what to do", 1)):
        table.add_column(heading, overflow="fold", ratio=share, no_wrap=share is None)
    for one in seen.findings:
        table.add_row(*map(_plain, (one.check, one.state, one.found, one.advice)))
    console().print(table)
    counts: Counter[str] = Counter(one.state for one in seen.findings)
    named = (("fault", "faults"), ("warning", "warnings"), ("ok", "ok"), ("skipped", "skipped"))
    said = [f"{counts[one]} {one if counts[one] == 1 else several}" for one, several in named if counts[one]]
    typer.echo(", ".join(said))
    if seen.kept is not None:
        typer.echo(f"the job's files are in {seen.kept}")


def _plain(words: str) -> Text:
    from rich.text import Text  # noqa: PLC0415  see doctor

    return Text(words)  # brackets in it are no markup
