"""What every paper's command draws, from the lists in `jobs/papers`."""

from __future__ import annotations

from pathlib import Path

from analysis.figures import FIGURES
from harness.study.papers import read_paper

FOLDER = Path(__file__).parents[2] / "jobs" / "papers"


def papers_reference() -> str:
    """The figures of every paper at every size."""
    parts: list[str] = []
    for paper, size in sizes():
        content, _ = read_paper(paper, size, FOLDER)
        parts += [f"## {paper}, {size}", "", f"{content.title}. Here: {content.about}.", ""]
        parts += ["```text", f"kronscale reproduce {paper} --size {size}", "```", ""]
        parts += ["| in the paper | drawn as | from the sweep |", "|---|---|---|"]
        parts += [
            f"| {one.shows} | {FIGURES[one.figure].title} | `{FOLDER.name}/{paper}/{size}/{one.sweep}.yaml` |"
            for one in content.figures
        ]
        parts.append("")
    return "\n".join(parts)


def sizes() -> list[tuple[str, str]]:
    """Every paper with each of its sizes."""
    return sorted((path.parent.name, path.stem) for path in FOLDER.glob("*/*.yaml"))
