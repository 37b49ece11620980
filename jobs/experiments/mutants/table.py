"""The table of mutants, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.experiments.mutants.mutant import Mutant, Package
from jobs.experiments.mutants.runner import SURVIVED, Findings

_HEAD = """\
# Mutants

Written by `make mutants`. Each breaks the code in one place; its tests, a few of the suite, run up to the
first failure. They pass on the code as it is. A mutant that changes no behaviour must survive: the table says
why.
"""


def unexplained(package: Package, findings: Findings) -> list[Mutant]:
    """Mutants that survive without a reason, or die although the list says that no test can notice them."""
    return [
        one
        for one in package.mutants
        if (result := findings.get(package.key(one))) is not None
        and (result == SURVIVED) != bool(one.survives)
    ]


def missing(package: Package, findings: Findings) -> list[Mutant]:
    """Mutants without a result, or whose code or tests were changed since."""
    return [one for one in package.mutants if findings.get(package.key(one)) is None]


def table(packages: Sequence[Package], findings: Findings) -> str:
    """Every mutant of every package with its result."""
    lines = [
        _HEAD,
        "| package | mutants | die | survive, explained | survive | not run |",
        "|---|---|---|---|---|---|",
    ]
    for package in packages:
        results = [findings.get(package.key(one)) for one in package.mutants]
        explained = sum(result == SURVIVED and bool(one.survives) for one, result in _pairs(package, results))
        survive = results.count(SURVIVED)
        unknown = results.count(None)
        numbers = (len(results), len(results) - survive - unknown, explained, survive - explained, unknown)
        lines.append(f"| {package.name} | {' | '.join(map(str, numbers))} |")
    for package in packages:
        lines += ["", f"## {package.name}", ""]
        lines += [package.about, ""] if package.about else []
        lines += [f"| | mutant | in `{package.name}/` | first test that fails |", "|---|---|---|---|"]
        results = [findings.get(package.key(one)) for one in package.mutants]
        for number, (one, result) in enumerate(_pairs(package, results), 1):
            lines.append(f"| {number} | {one.name} | `{one.path}` | {_shown(one, result)} |")
    return "\n".join(lines) + "\n"


def _pairs(package: Package, results: Sequence[str | None]) -> list[tuple[Mutant, str | None]]:
    return list(zip(package.mutants, results, strict=True))


def _shown(mutant: Mutant, result: str | None) -> str:
    if result is None:
        return "not run since its code or tests changed"
    if result:
        return f"`{result.replace('|', '&#124;')}`"
    return f"survives: {mutant.survives}" if mutant.survives else "**SURVIVED**"
