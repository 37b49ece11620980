"""Prints predictions and recommendations that were made from a study's own runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = 5
"""Candidates in the table of a recommendation."""


def print_predictions(content: Mapping[str, Any]) -> None:
    """A line per arm and world size, fastest first, and the notes."""
    from harness.cli.output import console, figure_table  # noqa: PLC0415  slow to load

    screen = console()
    columns = ("arm", "ranks", "ms a step", "low", "high", "most of it", "")
    grid = figure_table(f"{content['study']}: milliseconds a step", columns, "arm", "most of it", "")
    for one in sorted(content["arms"], key=lambda row: (row["world_size"], row["seconds"])):
        figures = (f"{1e3 * one[name]:.4g}" for name in ("seconds", "low", "high"))
        how = "measured" if one["measured"] else "predicted"
        grid.add_row(one["arm"], str(one["world_size"]), *figures, one["largest_phase"], how)
    screen.print(grid)
    _print_notes(content["notes"])


def print_recommendation(content: Mapping[str, Any]) -> None:
    """The sentence, the fastest candidates, and the notes."""
    from harness.cli.output import console, figure_table  # noqa: PLC0415  slow to load

    screen = console()
    screen.print(content["recommendation"], markup=False, highlight=False, soft_wrap=True)
    by_target = ("epochs", "s to target", "low", "high") if content["to_target"] else ()
    grid = figure_table("", ("", "ms a step", "low ", "high ", *by_target, "GiB", "how"), "", "how")
    for one in content["candidates"][:SHOWN]:
        cells = [f"{1e3 * one[name]:.4g}" for name in ("seconds", "low", "high")]
        if content["to_target"]:
            to_target = ("seconds_to_target", "low_to_target", "high_to_target")
            cells += [f"{one['epochs']:.3g}", *(f"{one[name]:.4g}" for name in to_target)]
        cells.append("" if one["peak_bytes"] is None else f"{one['peak_bytes'] / 2**30:.3g}")
        how = "measured" if one["measured"] else "predicted" if one["ran"] else "predicted, never run"
        grid.add_row(one["name"], *cells, how)
    screen.print(grid)
    more = len(content["candidates"]) - SHOWN
    _print_notes(([f"and {more} more candidates"] if more > 0 else []) + content["notes"])


def _print_notes(notes: Sequence[str]) -> None:
    from harness.cli.output import console  # noqa: PLC0415  slow to load

    screen = console()
    for note in notes:
        screen.print(note, markup=False, highlight=False, soft_wrap=True)
