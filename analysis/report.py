"""A study as one HTML page that opens offline, with its figures beside it as PDF, PNG and CSV."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from analysis.figures import FIGURES, NothingToDraw
from analysis.figures.files import save
from analysis.metrics import in_order, time_to_accuracy
from analysis.segments import resumed_note
from analysis.steps import CLOSURE_LIMIT, closure
from analysis.summary import summary_table
from analysis.tables import Study, load

__all__ = ["summary_table", "write_report"]


def write_report(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], out_dir: str | os.PathLike[str]
) -> Path:
    """Write `figures/` and `report.html` into `out_dir`; the page needs no other file.

    Args:
        paths: sweep folders, or names of sweeps under `results/runs`.
        out_dir: made if it is not there; files of an earlier report are replaced.

    Returns:
        The path of `report.html`.

    Raises:
        StoreError: a sweep folder is missing or unreadable.
    """
    study = load(paths)
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    # Cell ids and causes come from users' files and exceptions: everything is escaped.
    environment = Environment(
        loader=PackageLoader("analysis"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    page = environment.get_template("report.html.j2").render(
        sweeps=study.sweeps,
        states=study.cells["state"].value_counts().to_dict(),
        targets=_targets(study),
        resumed=resumed_note(study.cells),
        summary=_rows(summary_table(study)),
        figures=[_figure(study, name, out / "figures") for name in FIGURES],
        instrument=_instrument(study),
        environments=_environments(study),
        runs=_runs(study),
    )
    path = out / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def _figure(study: Study, name: str, folder: Path) -> dict[str, str]:
    kind = FIGURES[name]
    try:
        drawing = kind.draw(study)
    except NothingToDraw as reason:
        return {"name": name, "title": kind.title, "caption": f"Nothing to draw: {reason}.", "png": ""}
    png = next(path for path in save(drawing, folder, name) if path.suffix == ".png")
    image = base64.b64encode(png.read_bytes()).decode()
    return {"name": name, "title": kind.title, "caption": drawing.caption, "png": image}


def _targets(study: Study) -> list[str]:
    sign = {"higher": "≥", "lower": "≤"}
    fields = ["workload", "target_metric", "target_direction", "target_value"]
    distinct = study.cells[fields].drop_duplicates().itertuples(index=False)
    return [f"{workload}: {metric} {sign[way]} {value:g}" for workload, metric, way, value in distinct]


def _instrument(study: Study) -> list[dict[str, Any]]:
    """Per arm and world size: windows, how many close, the worst residual and the share of `other`."""
    windows = closure(study).merge(study.cells[["run", "arm", "world_size", "seed"]], on="run")
    rows = []
    for (arm, size), group in in_order(study, windows).groupby(["arm", "world_size"], sort=False):
        other = group["other_seconds"].clip(lower=0).sum() / group["wall_seconds"].sum()
        rows.append(
            {
                "arm": arm,
                "world_size": size,
                "windows": len(group),
                "open": int((~group["closes"]).sum()),
                "worst": f"{group['residual_share'].max():.2%}",
                "other": f"{other:.1%}",
                "limit": f"{CLOSURE_LIMIT:.0%}",
            }
        )
    return rows


def _environments(study: Study) -> list[dict[str, Any]]:
    """Every distinct value of every key, with the number of runs that had it."""
    table = study.environments.groupby(["key", "value"], sort=True)["run"].nunique().reset_index(name="runs")
    return _rows(table)


def _runs(study: Study) -> list[dict[str, Any]]:
    """One row per cell, with what it takes to look at its files and to run it again."""
    scored = time_to_accuracy(study)[["run", "reached", "seconds", "epochs"]]
    runs = in_order(study, study.cells.merge(scored, on="run", how="left"))
    runs["rerun"] = [
        f'kronscale run -f <sweep file of {sweep}> --where "id={cell}"'
        for sweep, cell in zip(runs["sweep"], runs["cell"], strict=True)
    ]
    runs["seconds"] = ["–" if pd.isna(value) else f"{value:.4g}" for value in runs["seconds"]]
    runs["epochs"] = ["–" if pd.isna(value) else f"{value:g}" for value in runs["epochs"]]
    runs["reached"] = ["–" if pd.isna(value) else "yes" if value else "no" for value in runs["reached"]]
    columns = [
        "arm",
        "world_size",
        "seed",
        "cell",
        "state",
        "cause",
        "reached",
        "seconds",
        "epochs",
        "segments",
        "path",
        "rerun",
    ]
    return _rows(runs[columns])


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(key): value for key, value in row.items()} for row in frame.to_dict("records")]
