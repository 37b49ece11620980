"""Promise: no mutation of a stored file raises a traceback or changes a number in silence."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from analysis.records.loading import _read
from analysis.records.run_files import read_run
from harness.cell import Cell
from harness.errors import StoreError
from harness.launchers.launch import Launch, ProcessIdentity, RanksStarted, supervisor_identity
from harness.launchers.local.launcher import LocalLauncher
from harness.launchers.site_profile import Site
from harness.runs.attempt_outcome import Result
from harness.runs.checkpoint_store import Manifest, PartSum
from harness.runs.heartbeat import HeartbeatWriter, read_heartbeat
from harness.runs.record_lines import read_content
from harness.runs.records import SegmentRecord
from harness.runs.store import Attempt, CellFolder
from harness.runs.stored_files import read_as, with_checksum
from tests.analysis.conftest import Plan
from tests.mutations import COUNT

PLAN = Plan(methods=("comm_opt",), world_sizes=(2,), seeds=(0,), misses=(), epochs=2)
VALUES = (b'"0.99"', b"true", b"null", b"NaN", b"-Infinity", b"1e999", b"[]", b"{}", b"-1", b"9" * 40, b"0")
_NUMBER = re.compile(rb"-?\d+\.?\d*(?:e[-+]?\d+)?")
_KEY = re.compile(rb'"\w+": ')


def mutated(content: bytes, chance: Random) -> bytes:
    """One mutation: cut, another type, sign or key, lines doubled, deleted or swapped, or a flipped bit."""
    kind, lines = chance.randrange(8), content.splitlines(keepends=True)
    numbers, keys = list(_NUMBER.finditer(content)), list(_KEY.finditer(content))
    if kind == 0:
        return content[: chance.randrange(len(content))]
    if kind in (1, 2) and numbers:
        found = chance.choice(numbers)
        other = chance.choice(VALUES) if kind == 1 else b"-" + found[0]
        return content[: found.start()] + other + content[found.end() :]
    if kind == 3 and keys:
        one = chance.choice(keys)
        return content[: one.start()] + chance.choice(keys)[0] + content[one.end() :]
    if kind in (4, 5, 6):
        place = chance.randrange(len(lines))
        if kind == 4:
            lines.insert(place, chance.choice(lines))
        elif kind == 5:
            del lines[place]
        else:
            lines[place], lines[0] = lines[0], lines[place]
        return b"".join(lines)
    place = chance.randrange(len(content))
    return content[:place] + bytes([content[place] ^ (1 << chance.randrange(8))]) + content[place + 1 :]


@pytest.fixture
def attempt(write_study, tmp_path, monkeypatch) -> Attempt:
    """A completed run with every small file that readers know."""
    target = tmp_path / "runs" / "synthetic"
    shutil.copytree(write_study(PLAN), target)
    (cell_path,) = target.iterdir()
    made = Attempt(cell_path / "attempt-1")
    outcome = made.outcome()
    assert outcome is not None
    (made.path / "outcome.json").unlink()
    cell = CellFolder(cell_path).cell()
    LocalLauncher().plan(cell, Site(name="laptop", launcher="local", oversubscribe=True)).write(made)
    result = Result(True, "epochs", outcome.train_seconds, outcome.value, 40, "0" * 64)
    made.write("result.json", vars(result) | {"reached_target": outcome.reached_target})
    made.write("begun.json", {"started_at": 12.5, "cpus": [0, 1], "gpus": []})
    made.write("supervisor.json", ProcessIdentity("nowhere", 12, 3.5).to_dict())
    made.write("segment.json", vars(SegmentRecord(0, 1, 20, 1, 5.0, 2.5, True)))
    parts = {"shared.pt": vars(PartSum(10, 20)), "rank-00000.pt": vars(PartSum(30, 40))}
    content = vars(Manifest(1, 20, 1, 0, "interval", 7.5, {})) | {"parts": parts}
    (made.path / "manifest.json").write_text(with_checksum(content))
    with monkeypatch.context() as patch:
        patch.setattr("harness.runs.heartbeat.time.time", lambda: 1.75e9)  # every byte decides what is tried
        heartbeat = HeartbeatWriter(made.heartbeat(0))
        heartbeat.step = 12
        heartbeat.write("backward")
    made.write_outcome(outcome)
    return made


def of_run(attempt: Attempt) -> Any:
    """What the small files of a run say."""
    files = read_run(attempt.cell_folder)
    if files.faults:
        raise StoreError(files.faults[0])
    return files.outcome, files.launch, files.environment, files.layers, files.result


def of_records(attempt: Attempt) -> Any:
    """What the frames of a study hold."""
    read_content(attempt.records(0))
    frames = _read(attempt.path.parent.parent)
    if not frames["cells"]["valid"].all():
        raise StoreError(frames["cells"]["why"].iloc[0])
    return {name: frame.to_dict("list") for name, frame in frames.items()}


def of_cell(attempt: Attempt) -> Cell:
    cell = CellFolder(attempt.path.parent).cell()
    of_run(Attempt(attempt.path))
    return cell


KINDS: dict[str, Callable[[Attempt], Any]] = {
    "outcome.json": of_run,
    "environment.json": of_run,
    "layers.json": of_run,
    "result.json": of_run,
    "launch.json": lambda attempt: (of_run(attempt), Launch.read(attempt)),
    "../cell.json": of_cell,
    "begun.json": RanksStarted.read,
    "supervisor.json": supervisor_identity,
    "segment.json": lambda attempt: attempt.read_as(SegmentRecord, "segment.json"),
    "manifest.json": lambda attempt: read_as(Manifest, attempt.path / "manifest.json"),
    "rank-00000.heartbeat": lambda attempt: read_heartbeat(attempt.heartbeat(0)),
    "rank-00000.jsonl": of_records,
}


@pytest.mark.parametrize("name", KINDS)
def test_a_mutated_file_is_refused_or_has_no_effect(attempt, name):
    path, read, chance = attempt.path / name, KINDS[name], Random(f"{name} {COUNT}")  # noqa: S311
    content, whole = path.read_bytes(), read(attempt)
    counts: Counter[str] = Counter()
    for _ in range(COUNT):
        changed = mutated(content, chance)
        path.write_bytes(changed)
        try:
            found = read(attempt)
        except StoreError:
            counts["refused"] += 1
            continue
        if found is None or (name.endswith(".heartbeat") and found != whole):
            counts["refused"] += 1  # no heartbeat, or the older of two, as after a kill
            continue
        assert found == whole or repr(found) == repr(whole), changed  # -0.0 is 0.0, and NaN is NaN
        counts["no effect"] += 1
    print(f"{name}: {COUNT} tried, {dict(counts)}")
    assert counts["refused"] > COUNT / 4
