"""Records that a rank writes while it trains: one JSON line each, append-only, one writer per file.

`results/README.md` explains every field, its unit and how ranks are summarised. A change of a field raises
`SCHEMA_VERSION`; stored lines keep the version they were written with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

SCHEMA_VERSION = 3
"""1: one segment per run, not recorded. 2: `segment` and `checkpoint_seconds`, records of segments and of
checkpoints. 3: `wait_seconds` and `instrument_seconds` of a window. Older lines are read as segment 0 and as
windows in which neither was measured."""

State = Literal[
    "STAGED", "PENDING", "RUNNING", "COMPLETED", "FAILED", "TIMEOUT", "PREEMPTED", "OOM", "NODE_FAIL",
    "CANCELLED", "LOST",
]  # fmt: skip
FINAL_STATES: tuple[State, ...] = (
    "COMPLETED", "FAILED", "TIMEOUT", "PREEMPTED", "OOM", "NODE_FAIL", "CANCELLED", "LOST",
)  # fmt: skip


@dataclass(frozen=True)
class PhaseRecord:
    """Time, traffic and memory of a window of steps on one rank.

    Attributes:
        rank: the writer.
        first_step: first step of the window, counted from 0.
        steps: steps in the window.
        samples: examples that this rank processed in the window.
        wall_seconds: train clock of the window, without evaluation and record writing.
        seconds: exclusive seconds by phase; time outside all phases is `other`, so the sum is `wall_seconds`.
        calls: number of times each phase was entered; for the comm phases, collectives issued.
        sent_bytes: payload bytes that this rank handed to collectives, by comm phase.
        memory_bytes: bytes by kind at the end of the window (`rss`, `rss_peak`, `kfac_factors`, ...).
        segment: of the run, see `SegmentRecord`; the next segment repeats an interrupted window.
        wait_seconds: by phase, the part of `seconds` in which collectives waited for late ranks; None unless
            the site sets `split_wait`.
        instrument_seconds: time of the phase timer itself, part of `seconds`: entries of phases times the
            cost of one entry, measured when the rank started. None if it was not measured.
    """

    KIND: ClassVar[str] = "phases"
    rank: int
    first_step: int
    steps: int
    samples: int
    wall_seconds: float
    seconds: Mapping[str, float]
    calls: Mapping[str, int]
    sent_bytes: Mapping[str, int]
    memory_bytes: Mapping[str, int]
    segment: int = 0
    wait_seconds: Mapping[str, float] | None = None
    instrument_seconds: float | None = None


@dataclass(frozen=True)
class EvalRecord:
    """One evaluation, written by rank 0; every rule of time to accuracy can be scored from these records.

    Attributes:
        step: steps taken so far.
        epoch: epochs finished so far.
        samples: examples seen so far, all ranks together.
        train_seconds: train clock, the slowest rank's (README, "The clock"); over all segments.
        eval_seconds: seconds in evaluations so far, this one included.
        wall_seconds: since the first batch was requested, with everything except the time between segments.
        metric: name of the target's metric.
        value: its value on the held-out examples.
        direction: `higher` or `lower` is better.
        train_loss: mean training loss since the previous evaluation, over all ranks.
        learning_rate: rate used in the last step.
        checkpoint_seconds: rank 0's seconds in checkpoints so far.
        segment: of the run, see `SegmentRecord`.
    """

    KIND: ClassVar[str] = "evaluation"
    rank: int
    step: int
    epoch: float
    samples: int
    train_seconds: float
    eval_seconds: float
    wall_seconds: float
    metric: str
    value: float
    direction: Literal["higher", "lower"]
    train_loss: float
    learning_rate: float
    checkpoint_seconds: float = 0.0
    segment: int = 0


@dataclass(frozen=True)
class SegmentRecord:
    """The first line of a rank at each start: the step at which the run begins or resumes.

    It supersedes what earlier segments wrote about later steps, because this segment repeats these steps; see
    `harness.runs.effective_records`.

    Attributes:
        rank: the writer.
        segment: number of the start, counted from 0 over all attempts of the run.
        first_step: first step of the segment; 0 without a checkpoint.
        attempt: number of the attempt whose checkpoint was loaded, None without one.
        started_at: Unix time, seconds.
        away_seconds: since that checkpoint was complete: requeueing, waiting and starting; on no other clock.
        bitwise: whether it resumes bit for bit; false if the world size has changed.
        notes: sentences for people, such as which damaged checkpoint was skipped.
    """

    KIND: ClassVar[str] = "segment"
    rank: int
    segment: int
    first_step: int
    attempt: int | None
    started_at: float
    away_seconds: float
    bitwise: bool
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TraceRecord:
    """The traced steps of a window, phase by phase; only steps that the site's `traced_steps` selects.

    Attributes:
        rank: the writer.
        segment: of the run.
        host: the host whose clock `started_at` was read from.
        spans: (step, phase, start in seconds since `started_at`, seconds, layer), in order of time. The layer
            is empty if the work is not that of one layer; old lines have no layer.
        started_at: Unix time of the first span, seconds.
    """

    KIND: ClassVar[str] = "trace"
    rank: int
    segment: int
    host: str
    started_at: float
    spans: tuple[tuple[int, str, float, float, str], ...]


@dataclass(frozen=True)
class DeviceRecord:
    """What the driver reports of a rank's GPU over a window; without a driver one per segment says why.

    Attributes:
        rank: the writer.
        segment: of the run.
        first_step: first step of the window.
        steps: steps in it.
        reason: why the other fields are null; empty if they are not.
        energy_joules: energy of the whole GPU since the last record.
        power_watts: at the end of the window, like all that follows.
        sm_clock_mhz: of the multiprocessors.
        memory_clock_mhz: of the memory.
        temperature_celsius: of the chip.
        throttle_reasons: names of the reasons for reduced clocks.
        device_used_bytes: of all processes, contexts and libraries included.
        foreign_processes: process ids of other processes that compute on it.
    """

    KIND: ClassVar[str] = "device"
    rank: int
    segment: int
    first_step: int
    steps: int
    reason: str
    energy_joules: float | None = None
    power_watts: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    temperature_celsius: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    device_used_bytes: int | None = None
    foreign_processes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint, saved or failed; written by rank 0.

    Attributes:
        step: steps taken so far, the first step of a resumed run.
        reason: what requested it: `interval`, `cancel`, or a signal's name.
        stops: whether the run ends after it.
        seconds: rank 0's time for it, outside the train clock.
        written_bytes: of all ranks together.
        error: why it could not be saved, so that the one before it is the newest; empty if it was saved.
    """

    KIND: ClassVar[str] = "checkpoint"
    rank: int
    segment: int
    step: int
    reason: str
    stops: bool
    seconds: float
    written_bytes: int
    error: str


@dataclass(frozen=True)
class FailureRecord:
    """The last line of a rank that ended by an exception."""

    KIND: ClassVar[str] = "failure"
    rank: int
    step: int
    phase: str
    error: str
    message: str
    traceback: str


Record = (
    PhaseRecord | EvalRecord | SegmentRecord | CheckpointRecord | TraceRecord | DeviceRecord | FailureRecord
)


def to_line(record: Record) -> str:
    """One line of JSON that begins with schema and kind."""
    return json.dumps({"schema": SCHEMA_VERSION, "kind": record.KIND, **asdict(record)}) + "\n"


class RecordWriter:
    """Appends records to one rank's file; each line is flushed to the system when `write` returns.

    If a killed predecessor left an incomplete line, the writer ends that line first.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        size = path.stat().st_size
        if size:
            with path.open("rb") as file:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    self._file.write("\n")

    def write(self, record: Record) -> None:
        """Append one line.

        Raises:
            OSError: the disk is full or gone; earlier lines are complete.
        """
        self._file.write(to_line(record))
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


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

    rank: int
    exit_code: int | None
    signal: str | None = None
    step: int | None = None
    phase: str | None = None
    error: str | None = None


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

    state: State
    cause: str
    reached_target: bool | None
    stop_reason: str
    started_at: float
    ended_at: float
    train_seconds: float | None = None
    value: float | None = None
    ranks: tuple[RankExit, ...] = ()
    checkpoint_step: int | None = None
    failed_nodes: tuple[str, ...] = ()
    schema: int = field(default=SCHEMA_VERSION)

    def to_json(self) -> str:
        """Indented JSON for people and programs."""
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        raw: dict[str, Any] = json.loads(text)
        raw["ranks"] = tuple(RankExit(**rank) for rank in raw["ranks"])
        raw["failed_nodes"] = tuple(raw.get("failed_nodes", ()))
        return cls(**raw)
