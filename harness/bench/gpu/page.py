"""The report of an acceptance run: one Markdown page with figures, from the parts' files (no torch here)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.bench.gpu.findings import PASSED, Row

_MOST_ROWS = 60
_MARKS = {True: "holds", False: "**does not hold**"}


def write_page(folder: Path, parts: Sequence[Row]) -> Path:
    """Write `report.md` and its figures; returns the page."""
    figures = _draw(folder, parts)
    lines = ["# Acceptance on a GPU", "", *_machine(parts), *_summary(parts)]
    for part in parts:
        lines += ["", f"## {part['part']}: {part['about']}", ""]
        lines += [f"{note[:1].upper()}{note[1:]}.\n" for note in part["notes"]]
        if part.get("error"):
            lines += [f"Broke off: `{part['error']}`; the log is `{part['part']}.log`.", ""]
        lines += [f"![{name}]({name})\n" for name in figures.get(part["part"], ())]
        lines += _checks(part)
        for name, rows in part["tables"].items():
            lines += _table(part["part"], name, rows)
    page = folder / "report.md"
    page.write_text("\n".join(lines).rstrip() + "\n")
    return page


def _machine(parts: Sequence[Row]) -> list[str]:
    """One line for each machine and version that the parts ran on."""
    keys = ("device", "torch", "cuda", "nccl", "python", "commit", "source")
    found: dict[str, list[str]] = {}
    for part in parts:
        about = ", ".join(f"{key} {part[key]}" for key in keys if part.get(key))
        found.setdefault(about, []).append(part["part"])
    return [f"- {about}: {', '.join(names)}" for about, names in found.items()] + [""]


def _summary(parts: Sequence[Row]) -> list[str]:
    rows = []
    for part in parts:
        held = sum(check["passed"] for check in part["checks"])
        outcome = part["outcome"] if part["outcome"] == PASSED else f"**{part['outcome']}**"
        rows.append(
            f"| {part['part']} | {outcome} | {held} of {len(part['checks'])} | {part.get('seconds', 0):.0f} |"
        )
    return ["| part | outcome | checks that hold | seconds |", "|---|---|---|---|", *rows]


def _checks(part: Row) -> list[str]:
    """Those that do not hold by name; the others, where they are many, by number."""
    checks = part["checks"]
    shown = [check for check in checks if len(checks) <= 12 or not check["passed"]]
    lines = [f"- {_MARKS[check['passed']]}: {check['name']} ({check['found']})" for check in shown]
    if rest := len(checks) - len(shown):
        lines.append(f"- {rest} {'more ' if shown else ''}checks hold")
    return [*lines, ""] if lines else []


def _table(part: str, name: str, rows: Sequence[Row]) -> list[str]:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [f"### {name}", "", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(_cell(row.get(column)) for column in columns)} |" for row in rows[:_MOST_ROWS]]
    if len(rows) > _MOST_ROWS:
        lines += ["", f"{len(rows) - _MOST_ROWS} more rows are in `{part}-{name}.csv`."]
    return [*lines, ""]


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _draw(folder: Path, parts: Sequence[Row]) -> dict[str, list[str]]:
    """File names of each part's figures; none without matplotlib."""
    try:
        from matplotlib import rcParams  # noqa: PLC0415  may be missing where this runs
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        return {}
    rcParams["svg.hashsalt"] = "kronscale"  # the same bytes each time
    drawn: dict[str, list[str]] = {}
    for part in parts:
        for table, draw in _FIGURES.items():
            rows = [row for row in part["tables"].get(table, ()) if "failed" not in row]
            if not rows:
                continue
            figure = Figure(figsize=(8, 5), layout="constrained")
            axes = figure.subplots()
            draw(axes, rows)
            names = axes.get_legend_handles_labels()
            if names[0]:  # below the axes: it would hide bars
                figure.legend(*names, loc="outside lower center", ncols=3, fontsize=7)
            name = f"{part['part']}-{table}.svg"
            figure.savefig(folder / name, metadata={"Date": None})
            drawn.setdefault(part["part"], []).append(name)
    return drawn


def _phases(axes: Any, rows: Sequence[Row]) -> None:
    """Stacked seconds of K-FAC's phases, a bar for each arm and kind of step."""
    bars = list(dict.fromkeys((row["arm"], row["kind"]) for row in rows if row["of_kfac"]))
    names = list(dict.fromkeys(row["phase"] for row in rows if row["of_kfac"]))
    seconds = {(row["arm"], row["kind"], row["phase"]): row["seconds"] for row in rows}
    left = [0.0] * len(bars)
    for name in names:
        widths = [1e3 * seconds.get((*bar, name), 0.0) for bar in bars]
        axes.barh(range(len(bars)), widths, left=left, label=name)
        left = [one + other for one, other in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(bars)), [f"{arm}: {kind}" for arm, kind in bars], fontsize=7)
    axes.set(xlabel="milliseconds a step", xscale="symlog", xlim=(0, None))


def _by_size(axes: Any, rows: Sequence[Row]) -> None:
    """Seconds of one factor by size, a line for each way, in the largest batch."""
    _lines(axes, rows, "way", "size", "factor_seconds", largest="batch")
    axes.set(xscale="log", yscale="log", xlabel="size of the factor", ylabel="seconds a factor")


def _epochs(axes: Any, rows: Sequence[Row]) -> None:
    _lines(axes, rows, "method", "epoch", "test_accuracy")
    axes.set(xlabel="epoch", ylabel="test accuracy")


def _ways(axes: Any, rows: Sequence[Row]) -> None:
    axes.barh([row["way"] for row in rows], [row["seconds"] for row in rows])
    axes.set(xlabel="seconds for all factors of ResNet-50")
    axes.tick_params(axis="y", labelsize=7)


def _forms(axes: Any, rows: Sequence[Row]) -> None:
    """Seconds of all layers of each network, by form."""
    names = list(dict.fromkeys(row["form"] for row in rows))
    networks = list(dict.fromkeys(row["network"] for row in rows))
    for place, network in enumerate(networks):
        sums = [
            sum(
                row["layers"] * row["seconds"]
                for row in rows
                if (row["form"], row["network"]) == (name, network)
            )
            for name in names
        ]
        axes.barh([at + 0.25 * place for at in range(len(names))], sums, height=0.25, label=network)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set(xlabel="seconds of all layers that have this form", xscale="log")


def _lines(axes: Any, rows: Sequence[Row], by: str, x: str, y: str, *, largest: str | None = None) -> None:
    for name in dict.fromkeys(row[by] for row in rows):
        points: dict[Any, Row] = {}
        for row in rows:
            if row[by] == name and (
                largest is None or row[x] not in points or row[largest] > points[row[x]][largest]
            ):
                points[row[x]] = row
        axes.plot(list(points), [row[y] for row in points.values()], marker=".", label=name)


_FIGURES: Mapping[str, Callable[[Any, Sequence[Row]], None]] = {
    "phases": _phases, "by_size": _by_size, "whole_network": _ways, "forms": _forms, "epochs": _epochs,
}  # fmt: skip
"""By table: what draws it."""
