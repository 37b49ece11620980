"""Records that a rank writes while it trains: one JSON line each, append-only, one writer per file.

`results/README.md` explains every field, its unit and how ranks are summarised. A change of a field raises
`SCHEMA_VERSION`; stored lines keep the version they were written with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from harness.errors import StoredFileError
from harness.runs.stored_files import STRICT, Count, Finite, Measured, Positive, Seconds

SCHEMA_VERSION = 6
"""1: one segment per run, not recorded. 2: `segment` and `checkpoint_seconds`, records of segments and of
checkpoints. 3: `wait_seconds` and `instrument_seconds` of a window. 4: checksums. 5: `load_seconds` and
`cpu_mhz` of a window. 6: `metrics` of an evaluation. Older lines are read as segment 0 and as windows in
which none of these was measured, older evaluations as of their target's metric alone."""

CHECKSUMS_SINCE = 4
"""Every small file of an attempt, and every rank's records of a completed one, ends with its checksum."""


def _no_negative_phase(seconds: Mapping[str, float]) -> Mapping[str, float]:
    for phase, value in seconds.items():
        if value < 0 and phase != "other":  # what remains of the wall time, so the cost of rounding
            raise ValueError(f"{phase} must be >= 0, got {value!r}")
    return seconds


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
        load_seconds: CPU seconds since the last window closed, by kind, as
            `harness.training.measurement.load` defines them: `capacity`, `foreign` and `steal` of the CPUs
            that the rank may use, `host_capacity` and `host_foreign` of all CPUs. None where the kernel does
            not tell.
        cpu_mhz: mean clock of the rank's CPUs at the end of the window; None where it is not known.
    """

    __pydantic_config__ = STRICT
    KIND: ClassVar[str] = "phases"
    rank: Count
    first_step: Count
    steps: Positive
    samples: Count
    wall_seconds: Seconds
    seconds: Annotated[Mapping[str, Finite], AfterValidator(_no_negative_phase)]
    calls: Mapping[str, Count]
    sent_bytes: Mapping[str, Count]
    memory_bytes: Mapping[str, Count]
    segment: Count = 0
    wait_seconds: Mapping[str, Seconds] | None = None
    instrument_seconds: Seconds | None = None
    load_seconds: Mapping[str, Seconds] | None = None
    cpu_mhz: Seconds | None = None


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
        metrics: every metric that the workload measured on the same examples, the target's among them; empty
            in lines older than schema 6.
    """

    __pydantic_config__ = STRICT
    KIND: ClassVar[str] = "evaluation"
    rank: Count
    step: Count
    epoch: Seconds
    samples: Count
    train_seconds: Seconds
    eval_seconds: Seconds
    wall_seconds: Seconds
    metric: str
    value: Measured
    direction: Literal["higher", "lower"]
    train_loss: Measured
    learning_rate: float
    checkpoint_seconds: Seconds = 0.0
    segment: Count = 0
    metrics: Mapping[str, Measured] = field(default_factory=dict)


@dataclass(frozen=True)
class SegmentRecord:
    """The first line of a rank at each start: the step at which the run begins or resumes.

    It supersedes what earlier segments wrote about later steps, because this segment repeats these steps; see
    `harness.runs.record_lines`.

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

    __pydantic_config__ = STRICT
    KIND: ClassVar[str] = "segment"
    rank: Count
    segment: Count
    first_step: Count
    attempt: Positive | None
    started_at: Seconds
    away_seconds: Seconds
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

    __pydantic_config__ = STRICT
    KIND: ClassVar[str] = "trace"
    rank: Count
    segment: Count
    host: str
    started_at: Seconds
    spans: tuple[tuple[Count, str, Finite, Seconds, str] | tuple[Count, str, Finite, Seconds], ...]


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

    __pydantic_config__ = STRICT
    KIND: ClassVar[str] = "device"
    rank: Count
    segment: Count
    first_step: Count
    steps: Count
    reason: str
    energy_joules: Seconds | None = None
    power_watts: Seconds | None = None
    sm_clock_mhz: Count | None = None
    memory_clock_mhz: Count | None = None
    temperature_celsius: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    device_used_bytes: Count | None = None
    foreign_processes: tuple[Count, ...] | None = None


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

    __pydantic_config__ = STRICT
    KIND: ClassVar[str] = "checkpoint"
    rank: Count
    segment: Count
    step: Count
    reason: str
    stops: bool
    seconds: Seconds
    written_bytes: Count
    error: str


@dataclass(frozen=True)
class FailureRecord:
    """The last line of a rank that ended by an exception."""

    __pydantic_config__ = STRICT
    KIND: ClassVar[str] = "failure"
    rank: Count
    step: Annotated[int, Field(ge=-1)]
    phase: str
    error: str
    message: str
    traceback: str


@dataclass(frozen=True)
class ChecksumRecord:
    """The last line of a rank that ended in order: what precedes it in the file.

    Attributes:
        rank: the writer.
        records: lines before this one.
        bytes: of these lines.
        crc32: of these bytes.
    """

    __pydantic_config__ = STRICT
    KIND: ClassVar[str] = "seal"  # as in stored files
    rank: Count
    records: Count
    bytes: Count
    crc32: Count


Record = (
    PhaseRecord
    | EvalRecord
    | SegmentRecord
    | CheckpointRecord
    | TraceRecord
    | DeviceRecord
    | FailureRecord
    | ChecksumRecord
)
KINDS: Mapping[str, type[Record]] = {kind.KIND: kind for kind in Record.__args__}


def to_line(record: Record) -> str:
    """One line of JSON that begins with schema and kind."""
    # the fields as they are: `asdict` would copy every number of every mapping
    return json.dumps({"schema": SCHEMA_VERSION, "kind": record.KIND, **vars(record)}) + "\n"


def check_schema(schema: int, path: Path, place: str = "") -> None:
    """Refuse what a newer version wrote.

    Raises:
        StoredFileError: the schema is newer than this version's.
    """
    if schema > SCHEMA_VERSION:
        raise StoredFileError(
            path,
            f"has schema {schema}; this version of Kronscale reads schemas up to {SCHEMA_VERSION}: update "
            "it, or remove this run",
            place,
        )
