"""What a report says about where its numbers are from: the study, its arms, runs, instrument, machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.conditions import cells_to_repeat
from analysis.metrics import in_order, time_to_accuracy
from analysis.records.study import Study
from analysis.report.tables import records
from analysis.steps import CLOSURE_LIMIT, run_closure, waits_measured


def targets(study: Study) -> list[str]:
    """`digits: accuracy ≥ 0.97`, for every target of the study."""
    sign = {"higher": "≥", "lower": "≤"}
    fields = ["workload", "target_metric", "target_direction", "target_value"]
    distinct = study.cells[fields].drop_duplicates().itertuples(index=False)
    return [f"{workload}: {metric} {sign[way]} {value:g}" for workload, metric, way, value in distinct]


def about(study: Study) -> str:
    """`36 of 36 runs completed; on cpu over gloo; batch 256, at most 60 epochs, float32`."""
    cells = study.cells
    states = cells["state"].value_counts().sort_index()
    others = "".join(f", {count} {state}" for state, count in states.items() if state != "COMPLETED")
    known = study.environments
    devices = sorted(set(known[known["key"] == "device"]["value"]))
    backends = sorted(set(known[known["key"] == "backend"]["value"]))
    where = f"; on {', '.join(devices)} over {', '.join(backends)}" if devices and backends else ""
    damaged = int((~cells["valid"]).sum())
    out = f", {damaged} left out" if damaged else ""
    completed = f"{int(states.get('COMPLETED', 0))} of {len(cells)} runs completed"
    return f"{completed}{others}{out}{where}{_setup(study)}"


def _setup(study: Study) -> str:
    """`; batch 64 to 256, at most 60 epochs, float32`: what the cells train with, or the range of it."""
    words = {
        "workload.options.model": "model {}",
        "training.global_batch_size": "batch {}",
        "training.local_batch_size": "batch {} on each rank",
        "training.epochs": "at most {} epochs",
        "training.precision": "{}",
    }
    parts = []
    for field, said in words.items():
        values = study.fields[field].unique().tolist() if field in study.fields else []
        if values and not any(pd.isna(value) for value in values):
            numbers = all(isinstance(value, int | float) for value in values)
            span = sorted({min(values), max(values)}) if numbers else sorted(map(str, values))
            parts.append(
                said.format((" to " if numbers else ", ").join(f"{v:g}" if numbers else v for v in span))
            )
    return f"; {', '.join(parts)}" if parts else ""


def arms(study: Study) -> list[tuple[str, str]]:
    """Every arm with what it trains by: `("sgd", "optimizer sgd at learning rate 0.4, without K-FAC")`."""
    first = in_order(study, study.cells).drop_duplicates("arm")
    rates = {} if first.empty else _learning_rates(study)
    found = []
    for one in first.itertuples(index=False):
        row: Any = one
        optimizer = f"optimizer {row.optimizer}{rates.get(row.run, '')}"
        if pd.isna(row.strategy):
            found.append((str(row.arm), f"{optimizer}, without K-FAC"))
            continue
        fraction = "" if pd.isna(row.grad_worker_fraction) else f" at fraction {row.grad_worker_fraction:g}"
        intervals = "".join(
            f", {what} every {'step' if value == 1 else f'{value:g} steps'}"
            for what, value in (
                ("factors", row.factor_update_steps),
                ("second-order data", row.inverse_update_steps),
            )
            if not pd.isna(value)
        )
        damping = "".join(
            f", {what} {value:g}"
            for what, value in (("damping", row.damping), ("relative damping", row.relative_damping))
            if not pd.isna(value)
        )
        schedules = f", {row.schedules}" if row.schedules else ""
        kfac = f"K-FAC, strategy {row.strategy}{fraction}, solver {row.solver}{intervals}{damping}{schedules}"
        found.append((str(row.arm), f"{kfac}; {optimizer}"))
    return found


def _learning_rates(study: Study) -> dict[str, str]:
    """` at learning rate 0.4 (cosine warmup=1)`, by run."""
    found = {}
    for row in study.fields.to_dict("records"):
        curve, warmup = row.get("optimizer.schedule"), row.get("optimizer.warmup_epochs")
        if isinstance(curve, str):
            shape = f" ({curve})"
        else:
            shape = f" (warmup_epochs={warmup:g})" if warmup and not pd.isna(warmup) else ""
        found[str(row["run"])] = f" at learning rate {row['optimizer.lr']:g}{shape}"
    return found


def instrument(study: Study) -> list[dict[str, Any]]:
    """Per arm and world size: how many windows close, the share of `other`, the cost of the timers."""
    runs = run_closure(study).merge(study.cells[["run", "arm", "world_size", "seed"]], on="run")
    split = waits_measured(study)
    rows = []
    for (arm, size), group in in_order(study, runs).groupby(["arm", "world_size"], sort=False):
        other = group["other_seconds"].sum() / group["wall_seconds"].sum()
        measured = group["run"].map(split).dropna()
        rows.append(
            {
                "arm": arm,
                "world_size": size,
                "windows": int(group["windows"].sum()),
                "open": int(group["open"].sum()),
                "worst": f"{group['worst'].max():.2%}",
                "other": f"{other:.1%}",
                "timers": _timers(group),
                "waits": "–" if measured.empty else "measured" if measured.all() else "bounds",
                "limit": f"{CLOSURE_LIMIT:.0%}",
            }
        )
    return rows


def _timers(runs: pd.DataFrame) -> str:
    """`12 µs, 0.08 %`: the cost of the phase timer per step, mean over ranks and runs."""
    known = runs[runs["instrument_seconds"].notna()]
    if known.empty:
        return "not measured"
    seconds = known["instrument_seconds"].sum()
    step, wall = seconds / known["instrument_steps"].sum(), known["instrument_wall_seconds"].sum()
    return f"{step * 1e6:.3g} µs, {seconds / wall:.2%}"


def environments(studies: Sequence[Study]) -> list[dict[str, Any]]:
    """Every distinct value of every key, with the number of runs that had it."""
    every = pd.concat([study.environments for study in studies], ignore_index=True)
    table = every.groupby(["key", "value"], sort=True)["run"].nunique().reset_index(name="runs")
    return records(table)


def runs_table(study: Study, commands: Mapping[str, str]) -> list[dict[str, Any]]:
    """One row per cell, with the path of its files and the command that runs it again.

    Args:
        study: the cells.
        commands: the command that runs a sweep, by the sweep's name; a cell's command adds `--where`.
    """
    scored = time_to_accuracy(study)[["run", "reached", "seconds", "epochs"]]
    runs = in_order(study, study.cells.merge(scored, on="run", how="left"))
    runs["cause"] = runs["cause"].where(runs["valid"], "left out: " + runs["why"])
    repeated = cells_to_repeat(study)
    runs["cause"] = [
        "; ".join(filter(None, (cause, "in a disturbed block" if cell in repeated else "")))
        for cause, cell in zip(runs["cause"], runs["cell"], strict=True)
    ]
    runs["rerun"] = [
        f'{commands.get(sweep, f"kronscale run {sweep}")} --where "id={cell}"'
        for sweep, cell in zip(runs["sweep"], runs["cell"], strict=True)
    ]
    runs["seconds"] = ["–" if pd.isna(value) else f"{value:.4g}" for value in runs["seconds"]]
    runs["epochs"] = ["–" if pd.isna(value) else f"{value:g}" for value in runs["epochs"]]
    runs["reached"] = ["–" if pd.isna(value) else "yes" if value else "no" for value in runs["reached"]]
    columns = [
        "arm", "world_size", "seed", "cell", "state", "cause", "reached", "seconds", "epochs", "segments",
        "moved", "path", "rerun",
    ]  # fmt: skip
    return records(runs[columns])
