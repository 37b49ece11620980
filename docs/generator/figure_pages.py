"""The gallery: every figure that the tool draws, from committed runs."""

from __future__ import annotations

from pathlib import Path

from analysis.figures import FIGURES

ROOT = Path(__file__).parents[2]
FOLDERS = "sc20-small", "tpds22-small", "dp_kfac-small", "nlcg-small", "sc20-embedded"
"""Of `results/figures`: the first that has a figure shows it."""


def gallery() -> str:
    """A section a figure, in the order of the report: question, name, picture and where it is from."""
    parts = []
    for name, kind in FIGURES.items():
        parts += [f"## {kind.title}", "", f"{kind.question} `kronscale report SWEEP --figure {name}`", ""]
        pictures = (
            sorted((ROOT / "results/figures" / each).glob(f"figures/*-{name}.png")) for each in FOLDERS
        )
        found = next((picture for some in pictures for picture in some), None)
        alone = ROOT / "results/figures" / f"{name}.png"
        if found is None and alone.exists():
            parts += [
                f"![{kind.title}]({alone.relative_to(ROOT)})",
                "",
                "From [the figures](results/in-small.md).",
                "",
            ]
            continue
        if found is None:
            parts += ["No committed run has what it needs.", ""]
            continue
        study = found.parent.parent.name
        paper, _, size = study.rpartition("-")
        parts += [f"![{kind.title}]({found.relative_to(ROOT)})", ""]
        parts += [f"From [`kronscale reproduce {paper} --size {size}`](results/{study}.md).", ""]
    return "\n".join(parts)
