"""Where K-FAC takes less time: epochs saved against the cost of an epoch, over all committed studies.

    python -m jobs.experiments.break_even_map

Reads the archives of `results/headline` and `results/figures/*/runs`; writes
`results/figures/break_even.png`, `.pdf` and `.csv`. Each study has a point per arm and
world size that it compares with its own first-order arm.
"""

from __future__ import annotations

from pathlib import Path

from analysis.figures.break_even import draw_studies
from analysis.figures.files import save
from analysis.records.study import Study
from analysis.records.tables import load
from harness.runs.archive import SUFFIX

FIGURES = Path("results/figures")
HEADLINE = Path("results/headline")
HEADLINE_STUDIES = {
    "headline": "ResNet-8 of CIFAR-10, first tuning",
    "headline-again": "the same, tuned again",
}
"""Studies whose blocks are an archive each, by the prefix of the archives' names."""


def studies() -> dict[str, Study]:
    """All committed studies that run to a target, by the name that the legend shows."""
    found = {
        label: load(sorted(HEADLINE.glob(f"{name}-p[0-9]*{SUFFIX}")))
        for name, label in HEADLINE_STUDIES.items()
    }
    for archive in sorted(FIGURES.glob(f"*/runs/*{SUFFIX}")):
        study = load(archive)
        if study.cells["strategy"].notna().any():  # else it has no K-FAC
            found[archive.name.removesuffix(SUFFIX)] = study
    return found


def main() -> None:
    """Write the figure and its numbers."""
    for path in save(draw_studies(studies()), FIGURES, "break_even"):
        print(path)


if __name__ == "__main__":
    main()
