"""Folders that data is read from: the embedded one, and the one that the option `data` means (no torch)."""

from __future__ import annotations

import os
from pathlib import Path

from harness.workloads.cards.card import FILES

DATA_VARIABLE = "KRONSCALE_DATA"
DEFAULT = "data"
EMBEDDED_FOLDER = Path(__file__).parents[1] / "embedded"


def data_folder(option: str) -> Path:
    """The folder that the option `data` means.

    A path in the option is part of the cell and of its hash. `files` means the folder that the variable
    KRONSCALE_DATA names (a site profile's `environment` sets it), or `data` in the working directory.
    """
    named = os.environ.get(DATA_VARIABLE) or DEFAULT if option == FILES else option
    return Path(os.path.expandvars(named)).expanduser()


def how_to_point(option: str) -> str:
    """End of an error message about missing data: how to name another folder."""
    if option == FILES:
        return f"or name your copy's folder in {DATA_VARIABLE} or in workload.options.data"
    return "or name another folder in workload.options.data"
