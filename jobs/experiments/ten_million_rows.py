"""Times the analysis of a large study: synthetic records in the real format.

    python jobs/experiments/ten_million_rows.py --rows 10000000 --out results/scale

A row is one of `Study.phases`: one rank, window and phase. A line of a record file holds a window with all
of its phases, so ten million rows are some 900,000 lines. Measured in fresh processes: `load` and all tables
of the report, without a cache (cold) and from the Parquet cache (warm); the files are in the system's own
cache. The numbers in the records are invented; only the analysis is measured.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from analysis.records.window_lines import PHASE_ORDER
from harness.cell import Cell
from harness.runs.attempt_outcome import Outcome
from harness.runs.records import EvalRecord, PhaseRecord, SealRecord, SegmentRecord, to_line
from harness.runs.store import Attempt, SweepFolder

METHODS: dict[str, dict[str, Any] | None] = {
    "sgd": None,
    "comm_opt": {"strategy": "comm_opt", "damping": 0.003},
    "mem_opt": {"strategy": "mem_opt", "damping": 0.003},
    "dp_kfac": {"strategy": "dp_kfac", "damping": 0.003},
}
WORLD_SIZES, SEEDS, WINDOW, EPOCHS = (16, 64), 3, 10, 20
SGD_PHASES = ("data", "forward", "backward", "gradient_comm", "update", "other")
LIMIT_SECONDS, LIMIT_BYTES = 15.0, 4e9


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
        seal = to_line(SealRecord(rank, len(lines), len(content), zlib.crc32(content)))
        attempt.records(rank).write_bytes(content + seal.encode())
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


def analyse(folder: Path) -> dict[str, float]:
    """Seconds of `load`, of the tables and of both, and the largest resident set, in this process."""
    from analysis.records.tables import load  # noqa: PLC0415
    from analysis.report.findings import cautions, findings  # noqa: PLC0415  imports are not timed
    from analysis.report.summary import costs_table, rules_table, summary_table  # noqa: PLC0415
    from analysis.report.tables import environments, instrument, runs_table  # noqa: PLC0415

    began = time.perf_counter()
    study = load(folder)
    loaded = time.perf_counter()
    for table in (findings, cautions, summary_table, rules_table, costs_table, instrument):
        table(study)
    runs_table(study, {})
    environments([study])
    done = time.perf_counter()
    return {
        "rows": len(study.phases),
        "load_seconds": loaded - began,
        "tables_seconds": done - loaded,
        "seconds": done - began,
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Write the study, analyse it cold and warm, and write the times as CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes, each cold and then warm")
    parser.add_argument("--out", type=Path, help="folder for ten_million_rows.csv")
    parser.add_argument("--analyse", type=Path, help="analyse this folder in this process, and print JSON")
    given = parser.parse_args()
    if given.analyse is not None:
        print(json.dumps(analyse(given.analyse)))
        return
    with tempfile.TemporaryDirectory(prefix="kronscale-scale-") as name:
        folder = Path(name) / "runs" / "scale"
        rows = write_study(folder, given.rows)
        files = list(folder.glob("*/attempt-1/rank-*.jsonl"))
        size = sum(file.stat().st_size for file in files)
        print(f"{rows} rows of phases in {len(files)} files, {size / 1e6:.0f} MB")
        measured = []
        for repeat in range(given.repeats):
            subprocess.run(["rm", "-rf", str(Path(name) / "derived")], check=True)
            for state in ("cold", "warm"):
                command = [sys.executable, __file__, "--analyse", str(folder)]
                said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                measured.append({"state": state, "repeat": repeat, "file_bytes": size, **json.loads(said)})
                print(measured[-1], flush=True)
    worst = max(row["seconds"] for row in measured), max(row["peak_rss_bytes"] for row in measured)
    met = worst[0] < LIMIT_SECONDS and worst[1] < LIMIT_BYTES
    result = "met" if met else "MISSED"
    print(f"slowest {worst[0]:.1f} s, largest {worst[1] / 1e9:.2f} GB: goal of 15 s and 4 GB {result}")
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        with (given.out / "ten_million_rows.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, [*measured[0], "cpus", "machine"])
            writer.writeheader()
            place = {"cpus": len(os.sched_getaffinity(0)), "machine": platform.machine()}
            writer.writerows({**row, **place} for row in measured)


if __name__ == "__main__":
    main()
