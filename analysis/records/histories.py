"""The evaluations of each run as arrays: a frame for each would cost more than what is computed from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

History = Mapping[str, np.ndarray]
"""The evaluations of a run, in the order of the frame: a column's values by its name."""

_TEXTS = ("metric", "direction")


def histories(evaluations: pd.DataFrame, columns: Sequence[str]) -> dict[str, History]:
    """By run, these columns of its evaluations."""
    arrays = {name: evaluations[name].to_numpy("object" if name in _TEXTS else None) for name in columns}
    places = evaluations.groupby("run", observed=True).indices
    return {str(run): {name: values[at] for name, values in arrays.items()} for run, at in places.items()}
