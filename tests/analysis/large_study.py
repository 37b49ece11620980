"""A large study of synthetic records in the real format."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from analysis.records.window_lines import PHASE_ORDER
from harness.cell import Cell
from harness.runs.attempt_outcome import Outcome
from harness.runs.records import ChecksumRecord, EvalRecord, PhaseRecord, SegmentRecord, to_line
from harness.runs.store import Attempt, SweepFolder

METHODS: dict[str, dict[str, Any] | None] = {
    "sgd": None,
    "comm_opt": {"strategy": "comm_opt", "damping": 0.003},
    "mem_opt": {"strategy": "mem_opt", "damping": 0.003},
    "dp_kfac": {"strategy": "dp_kfac", "damping": 0.003},
}
WORLD_SIZES, SEEDS, WINDOW, EPOCHS = (16, 64), 3, 10, 20
SGD_PHASES = ("data", "forward", "backward", "gradient_comm", "update", "other")


def write_study(folder: Path, rows: int) -> int:
    """A sweep of four methods on two world sizes with at least `rows` rows of phases; how many it has."""
    cells = list(_cells())
    per_window = sum(len(_phases(cell)) * cell.world_size for cell in cells)
    windows = -(-rows // per_window)
    sweep = SweepFolder(folder)
    for cell in cells:
        _write_run(sweep.stage(cell).new_attempt(), cell, windows)
    return per_window * windows


def _cells() -> Iterator[Cell]:
    fixed = {
        "sweep": "scale", "workload": "digits", "target": {"metric": "accuracy", "at_least": 0.95},
        "training": {"global_batch_size": 256, "epochs": EPOCHS}, "optimizer": {"lr": 0.1},
    }  # fmt: skip
    for seed in range(SEEDS):
        for method, kfac in METHODS.items():
            for world_size in WORLD_SIZES:
                own = {"method": method, "world_size": world_size, "seed": seed, "kfac": kfac}
                yield Cell.model_validate({**fixed, **own})


def _phases(cell: Cell) -> tuple[str, ...]:
    return PHASE_ORDER if cell.kfac is not None else SGD_PHASES


def _write_run(attempt: Attempt, cell: Cell, windows: int) -> None:
    attempt.write("launch.json", {"launcher": "local", "site": "made up", "oversubscribed": False})
    attempt.write("environment.json", {"commit": "made up", "python": "3.11"})
    chance = np.random.default_rng(list(cell.id.encode()))
    for rank in range(cell.world_size):
        lines = [to_line(SegmentRecord(rank, 0, 0, None, 0.0, 0.0, True))]
        lines += _windows(cell, rank, windows, chance)
        if rank == 0:
            lines += _evaluations(windows)
        content = "".join(lines).encode()
        ended = to_line(ChecksumRecord(rank, len(lines), len(content), zlib.crc32(content)))
        attempt.records(rank).write_bytes(content + ended.encode())
    seconds = windows * 0.13
    attempt.write_outcome(Outcome("COMPLETED", "", True, "target", 0.0, seconds, seconds, 0.98))


def _windows(cell: Cell, rank: int, windows: int, chance: np.random.Generator) -> Iterator[str]:
    """One line per window, all seconds different; the remainder of the line is built once, for speed."""
    phases = _phases(cell)
    moved = {phase: 40_000 for phase in phases if phase.endswith("_comm")}
    record = PhaseRecord(
        rank, -1, WINDOW, 160, -2.0, {"forward": -3.0}, dict.fromkeys(phases, WINDOW), moved,
        {"rss": 300_000_000, "rss_peak": 310_000_000, "model": 400_000, "optimizer": 400_000,
         "kfac_factors": 3_000_000, "kfac_second_order": 4_000_000},
        0, None, 1e-4,
    )  # fmt: skip
    one, two, three, four = re.split(r'-1(?=,)|-2\.0|\{"forward": -3\.0\}', to_line(record))
    for window, seconds in enumerate(chance.lognormal(-5.0, 0.3, (windows, len(phases))).tolist()):
        spelt = json.dumps(dict(zip(phases, seconds, strict=True)))
        yield f"{one}{window * WINDOW}{two}{sum(seconds)}{three}{spelt}{four}"


def _evaluations(windows: int) -> Iterator[str]:
    for epoch in range(1, EPOCHS + 1):
        step = epoch * windows * WINDOW // EPOCHS
        train, evaluating = step * 0.013, 0.1 * epoch
        value, loss = 0.5 + 0.024 * epoch, 1.0 / epoch
        record = EvalRecord(
            0, step, float(epoch), step * 256, train, evaluating, train + evaluating, "accuracy", value,
            "higher", loss, 0.1,
        )  # fmt: skip
        yield to_line(record)
