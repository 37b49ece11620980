"""What a rank writes while it trains: one JSON line a record, append-only, one writer per file.

`results/README.md` explains every field, its unit and how ranks are summarised. Change a field and
`SCHEMA_VERSION` rises; stored lines keep the version they were written with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, Self

SCHEMA_VERSION = 3
"""1: one segment a run, nothing said of it. 2: `segment` and `checkpoint_seconds`, records of segments and of
checkpoints. 3: `wait_seconds` and `instrument_seconds` of a window. Older lines are read as of segment 0, and
as of windows in which neither was measured."""

State = Literal[
    "STAGED", "PENDING", "RUNNING", "COMPLETED", "FAILED", "TIMEOUT", "PREEMPTED", "OOM", "NODE_FAIL",
    "CANCELLED", "LOST",
]  # fmt: skip
FINAL_STATES: tuple[State, ...] = (
    "COMPLETED", "FAILED", "TIMEOUT", "PREEMPTED", "OOM", "NODE_FAIL", "CANCELLED", "LOST",
)  # fmt: skip


@dataclass(frozen=True)
class PhaseRecord:
    """A window of steps on one rank: where its time, its bytes and its memory went.

    Attributes:
        rank: the writer.
        first_step: first step of the window, counted from 0.
        steps: steps in the window.
        samples: examples that this rank processed in the window.
        wall_seconds: train clock of the window: evaluation and record writing are outside.
        seconds: exclusive seconds by phase; what no phase claims is `other`, so they add up to the wall.
        calls: times each phase was entered; for the comm phases, collectives issued.
        sent_bytes: payload bytes that this rank handed to collectives, by comm phase.
        memory_bytes: bytes by kind at the end of the window (`rss`, `rss_peak`, `kfac_factors`, ...).
        segment: of the run, see `SegmentRecord`; the later one writes a cut window whole.
        wait_seconds: by phase, the part of `seconds` that collectives waited for late ranks; None where the
            site did not ask for it (`split_wait`).
        instrument_seconds: what the phase timer itself took: entries of phases times the cost of one,
            measured when the rank started; part of `seconds`. None where it was not measured.
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
    """One evaluation, written by rank 0; enough to score any rule of time-to-accuracy afterwards.

    Attributes:
        step: steps taken so far.
        epoch: epochs finished so far.
        samples: examples seen so far, all ranks together.
        train_seconds: train clock, the slowest rank's (README, "The clock"); over all segments.
        eval_seconds: seconds spent in evaluations so far, this one included.
        wall_seconds: since the first batch was asked for, everything included but the time between segments.
        metric: name of the target's metric.
        value: its value on the held-out examples.
        direction: `higher` or `lower` is better.
        train_loss: mean training loss since the previous evaluation, over all ranks.
        learning_rate: rate used in the last step.
        checkpoint_seconds: rank 0's seconds spent in checkpoints so far.
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
    """The first line of a rank each time that it is started: where in the run it goes on.

    It takes the place of everything that earlier segments wrote about later steps: their windows that end
    after `first_step` and their evaluations after it do not count, as this segment does those steps again.

    Attributes:
        rank: the writer.
        segment: 0 for the first start of a run, over all attempts that it goes on through.
        first_step: the step that it begins with; 0 without a checkpoint.
        attempt: number of the attempt whose checkpoint it goes on from, None without one.
        started_at: Unix time, seconds.
        away_seconds: since that checkpoint was complete: requeueing, waiting, starting; on no other clock.
        bitwise: whether it goes on bit for bit; not if the world size has changed.
        notes: sentences for people, such as which damaged checkpoint was passed over.
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
    """The sampled steps of a window, phase by phase; only of those that the site's `traced_steps` names.

    Attributes:
        rank: the writer.
        segment: of the run.
        host: whose clock `started_at` was read on.
        spans: (step, phase, start in seconds since `started_at`, seconds, layer), in order of time. The layer
            is empty where the work is not one layer's; lines of before it was told have no such part.
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
    """What the driver says of a rank's GPU over a window; without a driver once a segment, with the reason.

    Attributes:
        rank: the writer.
        segment: of the run.
        first_step: first step of the window.
        steps: steps in it.
        reason: why the rest is null; empty where it is not.
        energy_joules: spent by the whole GPU since the last record.
        power_watts: now.
        sm_clock_mhz: now, as all that follows.
        memory_clock_mhz: of the memory.
        temperature_celsius: of the chip.
        throttle_reasons: names of what holds its clocks down.
        device_used_bytes: of all processes, contexts and libraries included.
        foreign_processes: process numbers of others that compute on it.
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
    """A checkpoint, or one that could not be saved; written by rank 0.

    Attributes:
        step: steps taken so far: the one that a resumed run begins with.
        reason: what asked for it: `interval`, `cancel`, or a signal's name.
        stops: whether the run ends after it.
        seconds: rank 0's time for it, outside the train clock.
        written_bytes: of all ranks together.
        error: why it could not be saved, empty if it was; then the one before it is the newest.
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
    """One line of JSON, schema and kind first."""
    return json.dumps({"schema": SCHEMA_VERSION, "kind": record.KIND, **asdict(record)}) + "\n"


class RecordWriter:
    """Appends records to one rank's file; each line is on its way to disk when `write` returns.

    Half a line that a killed predecessor left is closed, so that the first line of this one stands alone.
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
            OSError: the disk is full or gone; lines written before are whole.
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
    """How one rank ended, as its launcher saw it.

    Attributes:
        exit_code: process exit code; negative signal number when killed; None when not known.
        signal: name of the signal that ended it, such as SIGKILL, or None.
        step: last step that it had begun, from its pulse; None if it never trained.
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
    """How an attempt ended; written last, by rename, so its presence means that the attempt is over.

    Attributes:
        state: a final state.
        cause: one sentence for people; empty for a completed attempt that reached its target.
        reached_target: whether the target was reached; None when training did not get to decide.
        stop_reason: why training stopped: `target`, `epochs`, `diverged`, `preempted`, or `error`.
        train_seconds: train clock at the end, the slowest rank's.
        value: last value of the target's metric.
        ranks: every rank's exit, the first cause first.
        checkpoint_step: the step that a retry would go on from; None if it would start anew.
        failed_nodes: hosts that failed under it, as its scheduler calls them.
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
