"""Filter files of data lie: a fact of the site, told by its environment; of the cell only if it says so."""

from __future__ import annotations

import os
from pathlib import Path

from harness.workloads.cards.vision import FILES

DATA_VARIABLE = "KRONSCALE_DATA"
DEFAULT = "data"


def data_folder(option: str) -> Path:
    """The folder that the option `data` means.

    A path in the option is part of the cell, and of its name. `files` is not: it means the folder that the
    variable KRONSCALE_DATA names (a site profile's `environment` sets it), or `data` where the run starts.
    """
    named = os.environ.get(DATA_VARIABLE) or DEFAULT if option == FILES else option
    return Path(os.path.expandvars(named)).expanduser()


def how_to_point(option: str) -> str:
    """The end of a sentence about data that is not there."""
    if option == FILES:
        return f"or name your copy's folder in {DATA_VARIABLE} or in workload.options.data"
    return "or name another folder in workload.options.data"
