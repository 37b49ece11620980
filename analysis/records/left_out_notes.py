"""Says which runs are left out of all numbers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pandas as pd

_NAMED = 3  # runs in a sentence, and faults of a run; `Study.cells` and the report's table have all


class LeftOutWarning(UserWarning):
    """Runs of a loaded study are not valid; `Study.cells` has `valid` and `why`."""


class EmptyStudyWarning(UserWarning):
    """What was loaded holds no cell that this version can read."""


def left_out_note(cells: pd.DataFrame) -> str:
    """How many runs are not valid, and why the first; empty if all are."""
    invalid = cells[~cells["valid"]]
    if invalid.empty:
        return ""
    reasons = [f"{run}: {_first(why)}" for run, why in zip(invalid["run"], invalid["why"], strict=True)]
    more = f" ... and {len(reasons) - _NAMED} more" if len(reasons) > _NAMED else ""
    runs = "run is" if len(invalid) == 1 else "runs are"
    return (
        f"{len(invalid)} of {len(cells)} {runs} left out of all numbers: files cannot be read or do not "
        f"agree. {'| '.join(reasons[:_NAMED])}{more}"
    )


def _first(why: str) -> str:
    """The first of a run's faults; of many ranks, each may have one."""
    faults = why.split("; ")
    more = f" ({len(faults) - _NAMED} more)" if len(faults) > _NAMED else ""
    return "; ".join(faults[:_NAMED]) + more


@contextmanager
def quietly() -> Iterator[None]:
    """Without warnings of `load`, for callers that print the notes themselves."""
    with warnings.catch_warnings():
        for kind in (LeftOutWarning, EmptyStudyWarning):
            warnings.simplefilter("ignore", kind)
        yield
