"""The papers' numbers as frames, with their sources; never used as a target or as a test's reference."""

from __future__ import annotations

import pandas as pd

from harness.shipped import shipped_root

FOLDER = shipped_root() / "results" / "published"

PRINTED = ("abstract", "release")
"""Sources drawn filled: printed in an abstract, or in the authors' own released repository."""

SOURCES = {
    "abstract": "printed in the paper's abstract",
    "release": "from the authors' released repository",
    "derived": "hollow: arithmetic from layer shapes, not measured by anyone",
    "recalled": "hollow: recalled from the printed table, unverified",
}


def published(name: str) -> pd.DataFrame:
    """One of `results/published/*.csv`, with `kind` (first word of its `source`) and `printed`."""
    table = pd.read_csv(FOLDER / f"{name}.csv")
    table["kind"] = table["source"].str.split().str[0]
    table["printed"] = table["kind"].isin(PRINTED)
    return table


def provenance(table: pd.DataFrame) -> str:
    """Caption: the sources of these numbers, and how each kind is drawn."""
    return "; ".join(SOURCES.get(kind, kind) for kind in dict.fromkeys(table["kind"]))
