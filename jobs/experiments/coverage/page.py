"""The page of simulated coverage: what the table says, and a line for every case."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from jobs.experiments.coverage.cases import BLOCKS, LEVEL, RULE, TREND, UNPAIRED
from jobs.experiments.coverage.simulation import MORE_STUDIES, STUDIES
from jobs.experiments.coverage.table import COVERAGE, SHORT, Line, error

_POWER = ("false claims %", "power 10 %", "power 25 %")
_COLUMNS = {
    BLOCKS: ("case", "comparisons", "n", "coverage %", *_POWER, "refused %", "no interval %", "finding"),
    LEVEL: ("case", "n", "coverage %", "no interval %", "finding"),
    TREND: ("scatter", "n of each of 2 arms", "false alarms %", "drift of 10 % found %", "of 25 % %"),
    RULE: ("rule", "n", "no score %", "scores of equal arms differ by", "coverage %", *_POWER, "finding"),
}


def page(lines: Sequence[Line]) -> str:
    """The page of the lines of the table."""
    parts = [*_head(len(lines)), *_summary(lines)]
    for group, members in groupby(lines, key=lambda one: one["group"]):
        columns = _COLUMNS.get(group, _COLUMNS[BLOCKS])
        parts += [f"\n## {group[0].upper()}{group[1:]}\n", _row(columns), f"|{'---|' * len(columns)}"]
        cases: dict[tuple[str, str], list[Line]] = {}
        for one in members:
            cases.setdefault((one["case"], one["comparisons"]), []).append(one)
        parts += [_row(_case(group, case, family, found)) for (case, family), found in cases.items()]
    return "\n".join(parts) + "\n"


def _head(rows: int) -> list[str]:
    some, more = f"{STUDIES:,}", f"{MORE_STUDIES:,}"
    chance = [f"{100 * error(studies):.1f}" for studies in (STUDIES, MORE_STUDIES)]
    return [
        "# How often the statistics are right\n",
        f"`make coverage` writes this page and [coverage.csv](coverage.csv): {rows} rows of {some}",
        f"simulated studies each, and of {more} where these leave a row in doubt, through the functions",
        "that make every report (`analysis.comparisons`, `analysis.statistics`, `analysis.metrics`).",
        "Runs scatter by 10 % and blocks by 20 % unless a case says otherwise. A line below is a case over",
        "several numbers of runs n, and its ranges go over these.\n",
        "- **Coverage**: 95 % intervals that hold the truth, of equal arms and of one that is 25 % faster.",
        "  The aim is 92 to 99 %; a wider interval costs power and makes no false claim.",
        "- **False claims**: studies of equal arms that claim any difference. The aim is at most 5 %; chance",
        f"  adds up to {chance[0]} points to a row of {some} studies and {chance[1]} to one of {more}.",
        "- **Power**: studies that find the one arm that is 10 % or 25 % faster.",
        "- **Refused**: comparisons without a verdict, because one arm ran after the other or because the",
        "  runs left are a selection. **No interval**: too few runs are left, or the median run missed.\n",
    ]


def _summary(lines: Sequence[Line]) -> list[str]:
    refused = sum(one["finding"] == "refused" for one in lines)
    said = [
        *(_of_speed_ups(group, lines) for group in (BLOCKS, UNPAIRED)),
        f"- {refused} rows are refused a verdict, as they should be.\n",
    ]
    short = [one for one in lines if one["finding"] in SHORT]
    if not short:
        return [*said, "No row falls short."]
    cases = groupby(short, key=lambda one: (one["group"], one["case"], one["finding"]))
    return [*said, "**Where it breaks:**\n", *(_breaks(*case, list(found)) for case, found in cases)]


def _of_speed_ups(group: str, every: Sequence[Line]) -> str:
    lines = [one for one in every if one["group"] == group]
    covered = [float(one[column]) for one in lines for column in COVERAGE if one[column]]
    most = max(float(one["false_claims"]) for one in lines)
    return (
        f"- {group[0].upper()}{group[1:]}, {len(lines)} rows: coverage {_range(covered)} %, false claims at "
        f"most {100 * most:.1f} %."
    )


def _breaks(group: str, case: str, finding: str, found: Sequence[Line]) -> str:
    if finding == SHORT[0]:
        how = f"{_range([float(one['false_claims']) for one in found])} % false claims"
    else:
        least = [min(float(one[column]) for column in COVERAGE if one[column]) for one in found]
        how = f"coverage {_range(least)} %"
    return f"- {group}, {case}, n = {_listed([one['runs'] for one in found])}: {how}"


def _case(group: str, case: str, family: str, found: Sequence[Line]) -> list[str]:
    def of(*columns: str) -> str:
        return _range([float(one[column]) for one in found for column in columns if one[column]])

    runs, coverage = _listed([one["runs"] for one in found]), of(*COVERAGE)
    power = [of("false_claims"), of("power_10"), of("power_25")]
    if group == LEVEL:
        return [case, runs, coverage, of("without"), _findings(found)]
    if group == TREND:
        return [case, runs, *power]
    if group == RULE:
        apart = [f"{100 * (float(one['score_95']) - 1):.0f} %" for one in found if one["score_95"]]
        return [case, runs, of("unscored"), ", ".join(apart) or "–", coverage, *power, _findings(found)]
    return [case, family, runs, coverage, *power, of("refused"), of("without"), _findings(found)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _range(shares: Sequence[float]) -> str:
    """In percent: `93 to 97.1`."""
    if not shares:
        return "–"
    low, high = (f"{100 * one:.1f}".removesuffix(".0") for one in (min(shares), max(shares)))
    return low if low == high else f"{low} to {high}"


def _listed(runs: Sequence[str]) -> str:
    if any("and" in one for one in runs):
        return "; ".join(one.replace(" and ", ":") for one in runs)
    return ", ".join(runs)


def _findings(found: Sequence[Line]) -> str:
    """`right`, or each finding with its numbers of runs."""
    kinds: dict[str, list[str]] = {}
    for one in found:
        kinds.setdefault(one["finding"], []).append(one["runs"])
    if len(kinds) == 1:
        return next(iter(kinds))
    return "; ".join(f"{kind} at {_listed(runs)}" for kind, runs in kinds.items())
