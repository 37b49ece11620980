"""How an attempt ended: `result.json` of rank 0, `outcome.json` of the launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import InitVar, asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator

from harness.errors import StoredFileError
from harness.runs.records import CHECKSUMS_SINCE, SCHEMA_VERSION, check_schema
from harness.runs.stored_files import (
    STRICT,
    Count,
    Measured,
    Positive,
    Seconds,
    file_as,
    has_checksum,
    with_checksum,
)  # fmt: skip

State = Literal[
    "STAGED", "PENDING", "RUNNING", "COMPLETED", "FAILED", "TIMEOUT", "PREEMPTED", "OOM", "NODE_FAIL",
    "CANCELLED", "LOST",
]  # fmt: skip
FINAL_STATES: tuple[State, ...] = (
    "COMPLETED", "FAILED", "TIMEOUT", "PREEMPTED", "OOM", "NODE_FAIL", "CANCELLED", "LOST",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """The end of a training run; rank 0 writes it to `result.json`, unless the run is to be resumed.

    Attributes:
        stop_reason: `target`, `epochs`, `diverged`, or `preempted` (by request, whether or not it was saved).
        value: last value of the target's metric.
        parameters_sha256: of rank 0's parameters at the end; equal digests mean runs equal bit for bit.
    """

    __pydantic_config__ = STRICT
    reached_target: bool
    stop_reason: Literal["target", "epochs", "diverged", "preempted"]
    train_seconds: Seconds
    value: Measured
    steps: Count
    parameters_sha256: str


@dataclass(frozen=True)
class RankExit:
    """How one rank ended, as reported by its launcher.

    Attributes:
        exit_code: process exit code; negative signal number if killed; None if unknown.
        signal: name of the signal that ended it, such as SIGKILL, or None.
        step: last step that it had begun, from its heartbeat; None if it never trained.
        phase: phase that it was in.
        error: first line of its exception, or None.
    """

    __pydantic_config__ = STRICT
    rank: Count
    exit_code: int | None
    signal: str | None = None
    step: Count | None = None
    phase: str | None = None
    error: str | None = None


def _is_final(state: State) -> State:
    if state not in FINAL_STATES:
        raise ValueError(f"must be one of {', '.join(FINAL_STATES)}, got {state!r}")
    return state


@dataclass(frozen=True)
class Outcome:
    """How an attempt ended; written last and atomically, so the attempt is over once the file exists.

    Attributes:
        state: a final state.
        cause: one sentence for people; empty if the attempt completed and reached its target.
        reached_target: whether the target was reached; None if training ended before it could tell.
        stop_reason: why training stopped: `target`, `epochs`, `diverged`, `preempted`, or `error`.
        train_seconds: train clock at the end, the slowest rank's.
        value: last value of the target's metric.
        ranks: every rank's exit, the root cause first.
        checkpoint_step: the step at which a retry would resume; None if it would start from the beginning.
        failed_nodes: names of hosts that failed during it, from its scheduler.
    """

    __pydantic_config__ = STRICT
    state: Annotated[State, AfterValidator(_is_final)]
    cause: str
    reached_target: bool | None
    stop_reason: str
    started_at: Seconds
    ended_at: Seconds
    train_seconds: Seconds | None = None
    value: Measured | None = None
    ranks: tuple[RankExit, ...] = ()
    checkpoint_step: Count | None = None
    failed_nodes: tuple[str, ...] = ()
    schema: Positive = field(default=SCHEMA_VERSION)
    seals: InitVar[Mapping[str, Count] | None] = None  # schemas 4 to 6: the other files' checksums, once more

    def __post_init__(self, seals: Mapping[str, int] | None) -> None:
        """Nothing: every file ends with its own checksum."""

    def to_json(self) -> str:
        """Indented JSON for people and programs, with its checksum."""
        return with_checksum(asdict(self))

    @classmethod
    def from_json(cls, text: bytes, path: Path) -> Self:
        """Read what `to_json` wrote.

        Args:
            text: content of the file.
            path: the file, for the error message.

        Raises:
            StoredFileError: it is damaged, or of a newer schema.
        """
        outcome = file_as(cls, text, path)
        check_schema(outcome.schema, path)
        if outcome.schema >= CHECKSUMS_SINCE and not has_checksum(text):
            raise StoredFileError(path, "has no checksum at its end: the file was changed or cut")
        return outcome
