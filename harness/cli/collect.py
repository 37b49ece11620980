"""`kronscale collect`: merges the runs of other machines into the folder of runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.options import RUNS, Runs

if TYPE_CHECKING:
    from harness.runs.collection import Merged


def collect(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Folder of runs, or of one sweep: a path, or HOST:PATH over SSH.",
            show_default=False,
        ),
    ],
    runs: Runs = RUNS,
    sweeps: Annotated[
        list[str] | None,
        typer.Option("--sweep", metavar="NAME", help="Only this sweep; may be repeated."),
    ] = None,
    logs: Annotated[
        bool, typer.Option("--logs/--no-logs", help="Also copy the standard output of the ranks.")
    ] = True,
    checksum: Annotated[
        bool,
        typer.Option(
            "--checksum", help="Compare contents, not sizes and times, and read back what was written."
        ),
    ] = False,
) -> None:
    """Merge runs of other machines into the folder of runs; repeating it copies only what is new.

    Checkpoints are left out. What differs from what is here is named and left as it is; the exit code is
    then 1.
    """
    from harness.runs.collection import is_remote, merge, mirrored  # noqa: PLC0415  loads pydantic
    from harness.runs.collection.copying import Copying  # noqa: PLC0415

    left = 0
    for source in sources:
        remote = is_remote(source)
        folder = mirrored(source, runs, logs=logs, checksum=checksum) if remote else Path(source)
        label = source if remote else str(folder.resolve())
        how = Copying(label, logs=logs, link=remote, checksum=checksum)
        for merged in merge(folder, runs, how, sweeps or ()):
            typer.echo(_summary(merged, label))
            for sentence in (*merged.differing, *merged.damaged):
                typer.echo(f"  left out: {sentence}")
            left += len(merged.differing) + len(merged.damaged)
    if left:
        raise typer.Exit(1)


def _summary(merged: Merged, source: str) -> str:
    ended = len(merged.new) - sum(name in set(merged.running) for name in merged.new)
    parts = [
        (ended, "new"),
        (len(merged.refreshed), "refreshed"),
        (len(merged.present), "here already"),
        (len(merged.running), "still running there"),
        (len(merged.not_begun), "not begun there"),
        (len(merged.differing), "different from what is here"),
        (len(merged.damaged), "damaged"),
    ]
    counts = ", ".join(f"{count} {word}" for count, word in parts if count) or "no attempt"
    cells = "1 cell" if merged.cells == 1 else f"{merged.cells} cells"
    return f"{merged.sweep}, {cells} in {source}: {counts}"
