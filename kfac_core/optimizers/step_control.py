"""Step control: shortens the step when the loss rises, by a table."""

from __future__ import annotations

from typing import NamedTuple

PERIOD_STEPS = 5  # the release's `step_line_search_period`
OLD_LOSS_WEIGHT = 0.7  # of the old average in the moving average of the loss
SMALLEST_SCALE = 1e-4
TOLERATED_RATIO, GROWTH = 1.01, 1.05


class Row(NamedTuple):
    """The change when the loss ratio exceeds `above`.

    Attributes:
        shrink: factor on the scale of the step.
        dropped: share of the last displacement to subtract.
    """

    above: float
    shrink: float
    dropped: float


# The release of arXiv:1812.02886, `online_line_search` at threshold 1; the paper has only the idea.
TABLE = (
    Row(1.15, 0.5, 0.9),
    Row(1.125, 0.7, 0.7),
    Row(1.10, 0.8, 0.5),
    Row(1.075, 0.9, 0.3),
    Row(1.05, 0.95, 0.2),
    Row(1.025, 0.975, 0.1),
)
BELOW_THE_TABLE = Row(TOLERATED_RATIO, 1.0, 0.1)


def controlled(scale: float, ratio: float) -> tuple[float, float]:
    """The new scale in [1e-4, 1] and the share of the last displacement to drop, in [0, 0.9].

    Args:
        scale: scale of the step so far.
        ratio: moving average of the loss over its value `PERIOD_STEPS` steps ago.
    """
    if ratio < TOLERATED_RATIO:
        return min(1.0, GROWTH * scale), 0.0
    row = next((row for row in TABLE if ratio > row.above), BELOW_THE_TABLE)
    return max(SMALLEST_SCALE, row.shrink * scale), row.dropped
