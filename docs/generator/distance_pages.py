"""How far every figure is from its paper's: from `distance.yaml`, published numbers and committed runs.

No number stands in `distance.yaml`: a paper's is a cell of `results/published`, ours a ratio of two arms over
the runs of a committed CSV, and whether a conclusion holds follows from that ratio's interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from analysis.comparisons import compared
from analysis.published import published
from analysis.statistics.intervals import Interval, ratio
from harness.study.papers import PaperFigure, read_paper

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("distance.yaml")

HOLDS, FAILS, OPEN = "holds", "does not hold", "not decided"
NOT_RUN, NOTHING = "not run", "nothing to hold"


class DistanceError(ValueError):
    """`distance.yaml` lacks a figure, has one too many, or names a number that does not exist."""


@dataclass(frozen=True)
class Row:
    """One figure of a paper.

    Attributes:
        shows: the figure, as the paper's list in `jobs/papers` names it.
        conclusion: what the paper concludes from it, as a ratio above 1; empty if it illustrates.
        theirs: the paper's value with its source.
        ours: our ratio with its interval, and how many runs; empty if none is committed.
        verdict: whether the conclusion holds in our runs.
        differs: how our runs differ from the paper's.
    """

    shows: str
    conclusion: str
    theirs: str
    ours: str
    verdict: str
    differs: str


def distance_reference() -> str:
    """The tables of all papers."""
    parts: list[str] = []
    for paper, size in sections():
        content, _ = read_paper(paper, size, ROOT / "jobs" / "papers")
        parts += [f"## {paper}, {size}", "", f"{content.title}. Paper's scale: {content.about}.", ""]
        parts += [
            "| figure | the paper's conclusion | the paper's value | ours | holds here? | what differs |"
        ]
        parts += ["|---|---|---|---|---|---|"]
        parts += [
            f"| {row.shows} | {row.conclusion or '–'} | {row.theirs or 'none known'} | {row.ours or '–'} "
            f"| {row.verdict} | {row.differs or '–'} |"
            for row in rows(paper, size)
        ]
        parts.append("")
    return "\n".join(parts)


def sections() -> list[tuple[str, str]]:
    """Every paper with the sizes that are its own scale."""
    return [(paper, size) for paper, sizes in _content().items() for size in sizes]


def rows(paper: str, size: str) -> Iterator[Row]:
    """The figures of a paper at its own scale, in its order.

    Raises:
        DistanceError: the lists of figures differ, or a number that is named does not exist.
    """
    content, _ = read_paper(paper, size, ROOT / "jobs" / "papers")
    told: dict[str, Any] = dict(_content()[paper][size])
    shown = [figure.shows for figure in content.figures]
    if set(told) != set(shown):
        raise DistanceError(
            f"{FILE.name}: {paper} {size} lacks {sorted(set(shown) - set(told))} "
            f"and has {sorted(set(told) - set(shown))}, which is no figure of it"
        )
    for figure in content.figures:
        yield _row(figure, told[figure.shows] or {}, f"{FILE.name}: {paper} {size}, {figure.shows}")


def verdict(interval: Interval) -> str:
    """Whether a ratio is above 1, by its 95 % limits."""
    if interval.low is None or interval.high is None or not math.isfinite(interval.estimate):
        return OPEN
    return HOLDS if interval.low > 1 else FAILS if interval.high < 1 else OPEN


def _row(figure: PaperFigure, told: Mapping[str, Any], where: str) -> Row:
    conclusion = told.get("conclusion", "")
    theirs = "; ".join(_theirs(each, where) for each in told.get("published", ()))
    found = [(each["reads"], measured(each, where)) for each in told.get("ours", ())]
    ours = "; ".join(f"{reads}: {_in_words(interval)}" for reads, interval in found)
    if not conclusion:
        judged = NOTHING
    elif not found:
        judged = NOT_RUN
    else:
        each = {verdict(interval) for _, interval in found}
        judged = each.pop() if len(each) == 1 else OPEN if FAILS not in each else "not everywhere"
    return Row(figure.shows, conclusion, theirs, ours, judged, told.get("differs", ""))


def measured(told: Mapping[str, Any], where: str) -> Interval:
    """The ratio of `of` over `over` in a committed CSV: a value per run, its rows added up; pairs by block.

    Raises:
        DistanceError: the file, the column or the runs do not exist.
    """
    path = ROOT / told["file"]
    if not path.is_file():
        raise DistanceError(f"{where}: {told['file']} does not exist")
    table = pd.read_csv(path)
    column = told.get("run", "run")
    top, bottom = (
        _per_run(table, {**told.get("where", {}), **told[side]}, told["value"], column, where)
        for side in ("of", "over")
    )
    if told.get("counted", False):
        return ratio(top["value"].tolist(), bottom["value"].tolist(), counted=True)
    return compared(top, bottom, "value")


def _per_run(
    table: pd.DataFrame, wanted: Mapping[str, Any], value: str, run: str, where: str
) -> pd.DataFrame:
    """The columns `value` and `block` of every run that matches; a run of no block has an empty one."""
    chosen = _matching(table, wanted, where)
    if value not in chosen:
        raise DistanceError(f"{where}: no column {value!r}, the file has {', '.join(table.columns)}")
    runs = chosen.groupby(run)
    blocks = runs["block"].first().fillna("") if "block" in chosen else ""
    return pd.DataFrame({"value": runs[value].sum().astype(float)}).assign(block=blocks)


def _theirs(told: Mapping[str, Any], where: str) -> str:
    """Such as `K-FAC eigen 92.92, K-FAC inverse 91.71 (recalled)`."""
    chosen = _matching(published(told["table"]), told.get("where", {}), where)
    if len(chosen) != 1:
        raise DistanceError(
            f"{where}: {told['where']} is {len(chosen)} rows of results/published/{told['table']}.csv"
        )
    row = chosen.iloc[0]
    if told["table"] == "headline":
        words = _claim(row)
    else:
        words = ", ".join(f"{name} {row[column]:g}" for name, column in told["columns"].items())
    return f"{words} ({row['kind']})"


def _claim(row: Any) -> str:
    low, high = row["low"], row["high"]
    ends = f"{low:g}" if pd.isna(high) or low == high else f"{low:g} to {high:g}"
    return f"{ends} {row['unit']}"


def _matching(table: pd.DataFrame, wanted: Mapping[str, Any], where: str) -> pd.DataFrame:
    for column, value in wanted.items():
        if column not in table:
            raise DistanceError(f"{where}: no column {column!r}, there are {', '.join(table.columns)}")
        table = table[table[column].isin(value if isinstance(value, list) else [value])]
    if table.empty:
        raise DistanceError(f"{where}: no row with {dict(wanted)}")
    return table


def _in_words(interval: Interval) -> str:
    limits = "" if interval.low is None else f" [{interval.low:.3g}, {interval.high:.3g}]"
    return f"{interval.estimate:.3g}{limits}, n = {interval.n}"


def _content() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return content
