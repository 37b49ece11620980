"""Reads the small files of a cell's runs and decides which attempt counts; faults are listed, not raised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from harness.errors import StoreError
from harness.runs.attempt_outcome import Outcome, Result
from harness.runs.layers_file import LayersFile
from harness.runs.records import CHECKSUMS_SINCE
from harness.runs.run_place import LaunchFacts, place_changes
from harness.runs.store import Attempt, CellFolder

T = TypeVar("T")


@dataclass
class RunFiles:
    """The files of the attempt that counts: the latest COMPLETED one, else the latest.

    Attributes:
        run: name of the run in all frames.
        attempt: None if the cell has none.
        outcome: None if it has not ended, or the file is damaged.
        result: as rank 0 wrote it.
        layers: as in `layers.json`.
        records: files of the ranks, of all attempts of the run in order.
        faults: why the run is not valid; empty if it is.
        moved: what changed where its attempts ran, such as `site from a to b`.
    """

    folder: CellFolder
    run: str
    attempts: int
    attempt: Attempt | None = None
    outcome: Outcome | None = None
    launch: LaunchFacts = field(default_factory=LaunchFacts)
    result: Result | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)
    records: list[Path] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    moved: str = ""

    @property
    def completed(self) -> bool:
        """Whether every rank's records must be there up to the last step."""
        return self.outcome is not None and self.outcome.state == "COMPLETED"

    @property
    def checked(self) -> bool:
        """Whether every file that was written before the outcome has a checksum."""
        return self.outcome is not None and self.outcome.schema >= CHECKSUMS_SINCE

    @property
    def state(self) -> str:
        """The outcome's state; LOST if it cannot be read; else RUNNING, PENDING or STAGED."""
        if self.outcome is not None:
            return self.outcome.state
        if self.attempt is None:
            return "STAGED"
        if (self.attempt.path / "outcome.json").exists():
            return "LOST"
        return "RUNNING" if any(_size(path) for path in self.records) else "PENDING"


def read_run(folder: CellFolder) -> RunFiles:
    """The files of the run of a cell that counts."""
    attempts = folder.attempts()
    name = f"{folder.path.parent.name}/{folder.id}"
    if not attempts:
        return RunFiles(folder, name, 0)
    outcomes, faults = _outcomes(attempts)
    completed = [number for number, outcome in outcomes.items() if outcome and outcome.state == "COMPLETED"]
    counting = attempts[-1] if not completed else next(one for one in attempts if one.number == completed[-1])
    files = RunFiles(folder, f"{name}/{counting.path.name}", len(attempts), counting)
    files.outcome = outcomes[counting.number]
    if not completed:  # one that cannot be read may have completed
        files.faults += faults
    _read_small_files(files, counting)
    files.records = _tried(files, lambda: _record_files(counting)) or []
    files.moved = "; ".join(_tried(files, lambda: place_changes(counting)) or [])
    files.faults = list(dict.fromkeys(files.faults))
    return files


def _outcomes(attempts: list[Attempt]) -> tuple[dict[int, Outcome | None], list[str]]:
    outcomes: dict[int, Outcome | None] = {}
    faults = []
    for attempt in attempts:
        try:
            outcomes[attempt.number] = attempt.outcome()
        except (StoreError, OSError) as error:
            outcomes[attempt.number] = None
            faults.append(str(error))
    return outcomes, faults


def _read_small_files(files: RunFiles, attempt: Attempt) -> None:
    def of(kind: type[T], name: str) -> T | None:
        return _tried(files, lambda: attempt.read_as(kind, name, checked=files.checked))

    files.launch = of(LaunchFacts, "launch.json") or LaunchFacts()
    files.environment = _tried(files, lambda: attempt.read("environment.json", checked=files.checked)) or {}
    files.result = of(Result, "result.json")
    layers = of(LayersFile, "layers.json")
    files.layers = [_as_lists(asdict(layer)) for layer in layers.layers] if layers is not None else []


def _record_files(attempt: Attempt) -> list[Path]:
    return [path for one in reversed(attempt.lineage()) for path in sorted(one.path.glob("rank-*.jsonl"))]


def _tried(files: RunFiles, read: Callable[[], T | None]) -> T | None:
    try:
        return read()
    except (StoreError, OSError) as error:
        files.faults.append(str(error))
        return None


def _as_lists(layer: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in layer.items()}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
