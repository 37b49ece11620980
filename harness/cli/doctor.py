"""`kronscale doctor`: checks whether a site can run a study."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.data import workloads_of
from harness.cli.options import RUNS, AsJson, Runs, SiteName
from harness.cli.output import print_findings
from harness.launchers.site_profile import read_site
from harness.workloads import WORKLOADS
from harness.workloads.description import FILES
from harness.workloads.sources.folders import DATA_VARIABLE

if TYPE_CHECKING:
    from harness.doctor.examine import Examination
    from harness.doctor.findings import Finding


def doctor(
    site: SiteName = "local",
    runs: Runs = RUNS,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks. Default: two on each of two nodes, or two on this host."),
    ] = None,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Time limit of the job, queueing included.")
    ] = 300.0,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", "-f", metavar="FILE", help="Sweep file: check the data of its workloads, too."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check a site before long runs, on this host and with one small job; exit code 1 on a fault."""
    from harness.doctor.data import check_data  # noqa: PLC0415
    from harness.doctor.examine import examine  # noqa: PLC0415  slow to load
    from harness.doctor.findings import any_fault  # noqa: PLC0415

    profile = read_site(site)
    folder = profile.environment.get(DATA_VARIABLE, FILES)  # as the ranks will have it
    of_data: list[Finding] = []
    for name, options in workloads_of(file) if file is not None else ():
        merged = {**WORKLOADS[name].options, **options}
        of_data += check_data(name, {**merged, "data": folder} if merged.get("data") == FILES else merged)
    examination = examine(profile, runs, ranks, wait, _print_progress)
    examination = replace(examination, findings=(*examination.findings, *of_data))
    if as_json:
        content = {"site": site, "runs": runs, **asdict(examination)}
        typer.echo(json.dumps(content, indent=1, default=str))  # paths as text
    else:
        _print(examination)
    if any_fault(examination.findings):
        raise typer.Exit(1)


def _print_progress(text: str) -> None:
    typer.echo(f"{time.strftime('%H:%M:%S')} {text}", err=True)


def _print(examination: Examination) -> None:
    print_findings(examination.findings)
    if examination.kept is not None:
        typer.echo(f"the job's files are in {examination.kept}")
