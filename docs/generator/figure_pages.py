"""The table of figures, made from their registry."""

from __future__ import annotations

from analysis.figures import FIGURES


def figure_table() -> str:
    """Name and title of every figure, in the order of the report."""
    rows = (f"| `{name}` | {kind.title} |" for name, kind in FIGURES.items())
    return "\n".join(["| name | what it shows |", "|---|---|", *rows]) + "\n"
