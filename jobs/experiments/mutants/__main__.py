"""Mutation tests of the three packages: breaks a copy in one place at a time and runs tests.

    make mutants                              all; writes results/mutants.md
    make mutants PACKAGE=analysis             one package
    make mutants ONLY="target"                the mutants with this in their name
    make mutants AGAIN=1                      also those whose result is known

What was found is kept in `.mutants_cache`, so that a run that was stopped continues; a result counts until
the mutant, the file that it breaks or its tests change. Exits with 1 if a mutant survives without a reason.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from jobs.experiments.mutants.lists import PACKAGES
from jobs.experiments.mutants.mutant import ROOT, Mutant
from jobs.experiments.mutants.runner import Findings, Job, run
from jobs.experiments.mutants.table import missing, table, unexplained


def main() -> int:
    """Run the mutants that were asked for; print each, and write the table."""
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else tests in progress would go on
    stale = _stale()
    findings = Findings(ROOT / ".mutants_cache" / "results.json")
    asked = [
        Job(package, mutant)
        for package in PACKAGES
        for mutant in package.mutants
        if options.package in (None, package.name)
        and options.only.lower() in mutant.name.lower()
        and mutant not in stale
    ]
    if not asked:
        sys.exit(f"no mutant of {options.package or 'any package'} has {options.only!r} in its name")
    jobs = [job for job in asked if options.again or findings.get(job.key) is None]
    print(f"{len(asked)} mutants, {len(asked) - len(jobs)} of them known", flush=True)
    failing = run(jobs, findings, lambda line: print(line, flush=True), options.pause_while) if jobs else []
    for test in failing:
        print(f"{test} fails on the code as it is, so it says nothing of mutants")
    return _conclude(findings, options.out) or bool(failing) or bool(stale)


def _stale() -> list[Mutant]:
    """The mutants whose text the code does not have exactly once any more; says so of each."""
    found = []
    for package in PACKAGES:
        for mutant in package.mutants:
            try:
                package.check(mutant)
            except SystemExit as error:
                print(f"{error.code}; renew its text in jobs/experiments/mutants/lists", flush=True)
                found.append(mutant)
    return found


def _conclude(findings: Findings, out: Path | None) -> int:
    unknown = sum(len(missing(package, findings)) for package in PACKAGES)
    wrong = [(package.name, one) for package in PACKAGES for one in unexplained(package, findings)]
    for name, one in wrong:
        print(f"{name}: {one.name}: {'dies, and should not' if one.survives else 'SURVIVES'}")
    if unknown:
        print(f"{unknown} mutants have no result for this code yet")
    if out is not None:
        out.write_text(table(PACKAGES, findings), encoding="utf-8")
        print(f"wrote {out}")
    return bool(wrong)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", type=Path, help="the table")
    parser.add_argument("--package", choices=[package.name for package in PACKAGES])
    parser.add_argument("--only", default="", help="part of the names of the mutants to run")
    parser.add_argument(
        "--pause-while", type=Path, metavar="FILE", help="start nothing while this file exists"
    )
    parser.add_argument("--again", action="store_true", help="also mutants whose result is known")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
