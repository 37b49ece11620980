"""What a launcher knows of an attempt that its files do not tell."""

from __future__ import annotations

from dataclasses import dataclass

from harness.runs.records import State


@dataclass(frozen=True)
class AttemptState:
    """The state of an attempt without an outcome.

    Attributes:
        state: None if it is as its files say.
        cause: one sentence for people.
        failed_nodes: hosts that failed under it.
        sure: whether the attempt is over for good and may be given an outcome in its launcher's place.
    """

    state: State | None
    cause: str
    sure: bool = False
    failed_nodes: tuple[str, ...] = ()
