"""The papers' numbers as frames, with their sources; never used as a target or as a test's reference."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

FOLDER = Path(__file__).resolve().parent.parent / "results" / "published"

PRINTED = ("abstract", "release")
"""Sources drawn filled: printed in an abstract, or in the authors' own released repository."""

SOURCES = {
    "abstract": "printed in the paper's abstract",
    "release": "from the authors' released repository",
    "derived": "hollow: arithmetic from layer shapes, not measured by anyone",
    "recalled": "hollow: recalled from the printed table, unverified",
}


def published(name: str) -> pd.DataFrame:
    """One of `results/published/*.csv`, with `kind` (first word of its `source`) and `printed`.

    Empty if the package runs without the repository's folder `results/`.
    """
    path = FOLDER / f"{name}.csv"
    if not path.is_file():
        return pd.DataFrame({"source": [], "kind": [], "printed": []})
    table = pd.read_csv(path)
    table["kind"] = table["source"].str.split().str[0]
    table["printed"] = table["kind"].isin(PRINTED)
    return table


def provenance(table: pd.DataFrame) -> str:
    """Caption: the sources of these numbers, and how each kind is drawn."""
    return "; ".join(SOURCES.get(kind, kind) for kind in dict.fromkeys(table["kind"]))
