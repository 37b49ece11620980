"""Writes a study as one HTML page that opens offline, as Markdown and LaTeX, and its figures as files."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined

from analysis.benchmarks import sentences
from analysis.figures import FIGURES, NothingToDraw
from analysis.figures.drawing import save
from analysis.records.left_out_notes import left_out_note
from analysis.records.loading import load
from analysis.records.study import Study
from analysis.report.alt_texts import alt_text
from analysis.report.answers import PREDICT, answers, headline, recommendation, unmeasured
from analysis.report.bars import chart
from analysis.report.conditions import checks, differed
from analysis.report.findings import cautions, findings
from analysis.report.glossary import WORDS, Explained, anchor, term
from analysis.report.larger_worlds import beyond
from analysis.report.markup import to_latex, to_markdown
from analysis.report.study_facts import about, arms, environments, instrument, runs_table, targets
from analysis.report.tables import (
    costs_table,
    fastest_table,
    metrics_table,
    records,
    rules_table,
    shortlist,
    summary_table,
    tuning_tables,
)
from analysis.results import results

PREDICTED = "Predicted from these runs, for ranks linked like theirs"

LARGEST_CSV = 1_500_000
"""Largest CSV, in bytes, that the page embeds; it names larger ones, which are files beside it."""


@dataclass(frozen=True)
class Panel:
    """A figure to draw, of the whole study or of a part of it.

    Attributes:
        figure: a key of `FIGURES`.
        title: heading; the figure's own by default.
        study: what to draw; the report's whole study by default.
        name: of its files; `figure` by default.
    """

    figure: str
    title: str = ""
    study: Study | None = None
    name: str = ""


def write_report(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | Study,
    out_dir: str | os.PathLike[str],
    panels: Iterable[Panel] | None = None,
    commands: Mapping[str, str] | None = None,
    title: str = "",
    also: Sequence[Study] = (),
    notes: Sequence[str] = (),
    recommend: str = "",
) -> Path:
    """Write `figures/`, `report.html`, `report.md` and `tables.tex` into `out_dir`; the page stands alone.

    Args:
        paths: sweep folders, names of sweeps under `results/runs`, or a study.
        out_dir: created if it does not exist; files of an earlier report are replaced.
        panels: figures in order; all registered figures by default.
        commands: command that runs a sweep, by the sweep's name.
        title: heading; the sweeps' names by default.
        also: other studies that panels show; their runs and environments are listed too.
        notes: warnings of the caller, such as that the study is a selection.
        recommend: command that predicts other world sizes from these runs; by default with the sweep's name.

    Returns:
        The path of `report.html`.

    Raises:
        StoreError: a sweep folder is missing or unreadable.
    """
    study = paths if isinstance(paths, Study) else load(paths)
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    chosen = (Panel(name) for name in FIGURES) if panels is None else panels  # a generator shows progress
    figures = [_figure(study, panel, out / "figures") for panel in chosen]
    others = [(one.sweeps[0] if one.sweeps else "", checks(one)) for one in also]
    if not recommend:
        recommend = PREDICT.replace("SWEEP", study.sweeps[0]) if len(study.sweeps) == 1 else PREDICT
    content = _content(study, figures, recommend) | {
        "title": title or ", ".join(study.sweeps) or "Empty study"
    }
    warned = [f"{name}: {check.sentence}" for name, found in others for check in found if check.warns]
    content["warnings"] = [*notes, *content["warnings"], *warned]
    content["environments"] = environments([study, *also])
    (out / "report.md").write_text(_markdown(content), encoding="utf-8")
    (out / "tables.tex").write_text(_latex(content), encoding="utf-8")
    # Cell ids and causes come from users' files and exceptions: everything is escaped.
    environment = Environment(
        loader=PackageLoader("analysis.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"explained": Explained(), "anchor": anchor, "term": term}
    path = out / "report.html"
    page = environment.get_template("report.html.j2").render(
        **content | {name: records(content[name]) for name in (*TABLES.values(), *TUNING_TABLES.values())},
        instrument=instrument(study),
        runs=[row for one in (study, *also) for row in runs_table(one, commands or {})],
        words=WORDS,
        heading=PREDICTED,
    )
    path.write_text(page, encoding="utf-8")
    return path


def _content(study: Study, figures: Sequence[dict[str, str]], recommend: str) -> dict[str, Any]:
    """The content of all three formats of the report; tables as frames of text."""
    tuning, trials = tuning_tables(study)
    shown, checked, said = results(study), checks(study), findings(study)
    places = shown.places
    return {
        "states": study.cells["state"].value_counts().sort_index().to_dict(),
        "targets": targets(study),
        "scoring": study.scoring.about,
        "headline": headline(places) or said[0],
        "answers": answers(places, differed(study)),
        "recommendation": recommendation(shown),
        "predicted": beyond(study, places),
        "unmeasured": unmeasured(places, recommend),
        "about": about(study),
        "left_out": left_out_note(study.cells),
        "arms": arms(study),
        "chart": chart(places),
        "fastest": fastest_table(shortlist(places)),
        "points": sum(len(place.points) for place in places),
        "findings": said,
        "warnings": [
            *cautions(study),
            *(check.sentence for check in checked if check.warns),
        ],
        "conditions": [check.sentence for check in checked if not check.warns],
        "benchmarks": sentences(study),
        "summary": summary_table(study),
        "metrics": metrics_table(study),
        "rules": rules_table(study),
        "costs": costs_table(study),
        "tuning": tuning,
        "trials": trials,
        "figures": [figure for figure in figures if figure["png"]],
        "undrawn": [figure for figure in figures if not figure["png"]],
    }


def _figure(study: Study, panel: Panel, folder: Path) -> dict[str, str]:
    kind = FIGURES[panel.figure]
    name = panel.name or panel.figure
    shown = {"name": name, "title": panel.title or kind.title, "png": "", "csv": "", "alt": ""}
    try:
        drawing = kind.draw(panel.study or study)
    except NothingToDraw as reason:
        return shown | {"caption": str(reason)}
    files = {path.suffix: path.read_bytes() for path in save(drawing, folder, name)}
    csv = files[".csv"] if len(files[".csv"]) <= LARGEST_CSV else b""
    return shown | {
        "caption": drawing.caption,
        "alt": alt_text(shown["title"], drawing),
        "png": base64.b64encode(files[".png"]).decode(),
        "csv": base64.b64encode(csv).decode(),
    }


def _markdown(content: Mapping[str, Any]) -> str:
    parts = [
        f"# {content['title']}",
        "",
        *([content["left_out"], ""] if content["left_out"] else []),
        f"{content['about']}. Target: {'; '.join(content['targets']) or 'none'} ({content['scoring']}).",
        "",
        f"**{content['headline']}**" if content["answers"] else content["headline"],
        "",
        *(f"- {line}" for line in content["answers"]),
        "",
        *_advised(content["recommendation"]),
        *([content["unmeasured"], ""] if content["unmeasured"] else []),
        *_listed(PREDICTED, content["predicted"]),
        *_listed("Warnings", content["warnings"]),
        *_listed("Arms", [f"{name}: {what}" for name, what in content["arms"]]),
        *_listed("Every comparison and condition", content["findings"] + content["conditions"]),
    ]
    for heading, name in _tables(content).items():
        parts += [f"## {heading}", "", to_markdown(content[name])]
        if name == "rules":
            parts += [*(f"- {line}" for line in content["benchmarks"]), ""]
    for figure in content["figures"]:
        image = f"![{figure['title']}](figures/{figure['name']}.png)"
        numbers = f"Its numbers: [{figure['name']}.csv](figures/{figure['name']}.csv)."
        parts += [f"## {figure['title']}", "", image, "", f"{figure['caption']} {numbers}", ""]
    if content["environments"]:
        table = pd.DataFrame(content["environments"])
        parts += ["## Software and machines", "", to_markdown(table)]
    if content["undrawn"]:
        parts += [
            "## Not drawn",
            "",
            *(f"- {one['title']}: {one['caption']}" for one in content["undrawn"]),
            "",
        ]
    return "\n".join(parts)


def _advised(lines: Sequence[str]) -> list[str]:
    if len(lines) == 1:
        return [f"**Recommendation.** {lines[0]}", ""]
    return ["**Recommendation.**", "", *(f"- {line}" for line in lines), ""] if lines else []


def _listed(heading: str, lines: Sequence[str]) -> list[str]:
    return [f"## {heading}", "", *(f"- {line}" for line in lines), ""] if lines else []


def _latex(content: Mapping[str, Any]) -> str:
    about = f"{content['title']}: {content['scoring']}"
    return "\n".join(
        to_latex(content[name], f"{heading}, {about}.", name) for heading, name in _tables(content).items()
    )


def _tables(content: Mapping[str, Any]) -> dict[str, str]:
    """Heading and name of every table; of trials and of several metrics only where there are any."""
    kept = {heading: name for heading, name in TABLES.items() if name != "metrics" or len(content[name])}
    return kept | (TUNING_TABLES if len(content["tuning"]) else {})


TABLES = {
    "Time to accuracy": "summary",
    "Every metric": "metrics",
    "The same runs under other rules (seconds)": "rules",
    "What a step costs": "costs",
}
TUNING_TABLES = {
    "How each method was tuned": "tuning",
    "Every trial": "trials",
}
