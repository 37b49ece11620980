"""The lines of the table of coverage, and what each says: right, or how it falls short."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs.experiments.coverage.cases import BLOCKS, RULE, UNPAIRED, Row, row_name
from jobs.experiments.coverage.simulation import MORE_STUDIES, STUDIES, Result, generator

LEAST, MOST = 0.92, 0.99
"""Coverage that is aimed at."""

FALSE_CLAIMS = 0.05

DOUBT = 0.93, 0.05
"""Coverage below, or false claims above which a row is simulated again, with more studies."""

NO_VERDICT = 0.995
"""Share of comparisons from which on a case counts as refused."""

COVERAGE = ("coverage", "coverage_25")
SHARES = ("refused", "without", *COVERAGE, "false_claims", "power_10", "power_25", "unscored")
SHORT = ("claims too often", "covers too rarely")
"""Findings that fall short."""

Line = Mapping[str, str]


def line(row: Row, studies: int = STUDIES) -> dict[str, str]:
    """The row's line of the CSV file, simulated; with more studies where these leave it in doubt."""
    found = row.simulate(generator(row.name), studies)
    if studies < MORE_STUDIES and _in_doubt(found):
        return line(row, MORE_STUDIES)
    shares = {share: _number(getattr(found, share)) for share in SHARES}
    return {
        "group": row.group, "case": row.case, "runs": row.runs, "comparisons": str(row.comparisons),
        "in_blocks": "yes" if row.block_design else "no", "studies": str(studies), "method": found.method,
        **shares, "score_95": _number(found.score_95), "finding": finding(row, found, studies),
    }  # fmt: skip


def finding(row: Row, found: Result, studies: int) -> str:
    """What a row says: `right`, `wide`, `refused`, `no interval`, or one of `SHORT`."""
    if row.group == RULE and found.unscored == 1:
        return "refused"
    if row.group in (BLOCKS, UNPAIRED) and found.refused >= NO_VERDICT:
        return "refused"
    if found.without >= NO_VERDICT:
        return "no interval"
    if found.false_claims > FALSE_CLAIMS + error(studies):
        return SHORT[0]
    covered = _coverage(found)
    if covered and min(covered) < LEAST:
        return SHORT[1]
    return "wide" if covered and max(covered) > MOST else "right"


def error(studies: int) -> float:
    """Two standard errors of a share of 5 % or 95 % of the studies: what chance adds to a row."""
    return 2 * math.sqrt(FALSE_CLAIMS * (1 - FALSE_CLAIMS) / studies)


def write_csv(lines: Sequence[Line], path: Path) -> None:
    """All lines."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def read_csv(path: Path) -> dict[str, Line]:
    """The lines of a table by the names of their rows."""
    with path.open(newline="") as file:
        found = list(csv.DictReader(file))
    return {row_name(one["group"], one["case"], one["runs"], one["comparisons"]): one for one in found}


def _in_doubt(found: Result) -> bool:
    return found.false_claims > DOUBT[1] or any(one < DOUBT[0] for one in _coverage(found))


def _coverage(found: Result) -> list[float]:
    return [one for one in (found.coverage, found.coverage_25) if not math.isnan(one)]


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"
