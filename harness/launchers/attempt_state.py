"""State of an attempt as reported by its launcher."""

from __future__ import annotations

from dataclasses import dataclass

from harness.runs.attempt_outcome import State


@dataclass(frozen=True)
class AttemptState:
    """State of an attempt without an outcome.

    Attributes:
        state: None if the attempt's files have the right one.
        cause: one sentence for the user.
        failed_nodes: hosts that failed while the attempt ran.
        sure: whether the attempt has certainly ended, so that the reader may write its outcome.
    """

    state: State | None
    cause: str
    sure: bool = False
    failed_nodes: tuple[str, ...] = ()
