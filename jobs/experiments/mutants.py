"""Random breaks of the code, one at a time: how many of them do the tests notice?

    python -m jobs.experiments.mutants results/mutants.csv --sample 200

cosmic-ray finds the places in kfac_core and in the comparisons and statistics of analysis that can be broken.
A random sample is broken in a clone of HEAD, one at a time, and the package's tests run up to the first
failure. A break counts as noticed if a test fails or hangs. Rows are appended as they come, so a run that was
stopped goes on at the same commit; another commit is another sample. The last column is for a person: does a
survivor change what anybody could observe?
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, TestOutcome

TESTS = {"kfac_core": "tests/kfac_core", "analysis": "tests/analysis"}
JUDGED = ("comparisons.py", "metrics.py", "rules.py", "statistics")  # of analysis
LIMIT_SECONDS = 900.0
COLUMNS = ("commit", "module", "line", "operator", "occurrence", "seconds", "outcome", "judgement")

# Annotations such as `X | None` are not evaluated, and shifts and bits of floats die of a TypeError.
IGNORED = re.compile("core/(RemoveDecorator|ReplaceBinaryOperator.*_(Bit|LShift|RShift|Pow))")


def modules() -> list[Path]:
    """The files that are broken."""
    judged = (Path("analysis", name) for name in JUDGED)
    files = [
        file
        for path in (Path("kfac_core"), *judged)
        for file in (path.rglob("*.py") if path.is_dir() else [path])
    ]
    return sorted(files)


def sampled(files: Iterable[Path], size: int, seed: int) -> list[MutationSpec]:
    """A random sample of the places in these files that can be broken, each with one of its breaks."""
    with tempfile.TemporaryDirectory() as folder, use_db(f"{folder}/all.sqlite", WorkDB.Mode.create) as found:
        init(files, found, {})
        breaks = [item.mutations[0] for item in found.work_items]
    places: dict[tuple[object, ...], list[MutationSpec]] = defaultdict(list)
    for one in sorted(breaks, key=lambda one: (str(one.module_path), one.operator_name, one.occurrence)):
        if not IGNORED.match(one.operator_name):
            places[one.module_path, one.start_pos, one.end_pos].append(one)
    print(f"{size} of {len(places)} places", flush=True)
    chance = random.Random(seed)  # noqa: S311  not a secret
    return [chance.choice(places[place]) for place in chance.sample(list(places), size)]


def noticed(one: MutationSpec) -> bool | None:
    """Whether a test notices this break of the working tree; None where cosmic-ray cannot make it."""
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-n", str(os.cpu_count())]
    folder = TESTS[one.module_path.parts[0]]
    quick, ranks = "not ranks and not slow and not gpu", "ranks and not slow and not gpu"
    kinds = (quick, ranks) if folder == "tests/kfac_core" else (quick,)  # without a test pytest fails
    both = " && ".join(shlex.join([*pytest, "-m", kind, folder]) for kind in kinds)
    result = mutate_and_test([one], shlex.join(["sh", "-c", both]), LIMIT_SECONDS)
    return None if result.test_outcome is None else result.test_outcome != TestOutcome.SURVIVED


def main() -> None:
    """Run the sample, and print the share that is noticed."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sample", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    out = given.out.resolve()
    rows = list(csv.DictReader(out.open())) if out.exists() else []
    commit = subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], text=True).strip()
    rows = [row for row in rows if row["commit"] == commit]
    known = {(row["module"], row["operator"], row["occurrence"]) for row in rows}
    with tempfile.TemporaryDirectory(prefix="kronscale-mutants-") as clone, out.open("a", newline="") as file:
        subprocess.run(["git", "clone", "--quiet", ".", clone], check=True)
        os.chdir(clone)
        os.environ["PYTHONPATH"] = clone
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        for one in sampled(modules(), given.sample, given.seed):
            key = str(one.module_path), one.operator_name, str(one.occurrence)
            if key in known:
                continue
            began, dies = time.monotonic(), noticed(one)
            seconds = round(time.monotonic() - began)
            outcome = "cannot be made" if dies is None else "dies" if dies else "survives"
            values = commit, key[0], one.start_pos[0], *key[1:], seconds, outcome, ""
            row = dict(zip(COLUMNS, values, strict=True))
            writer.writerow(row)
            file.flush()
            rows.append(row)
            print(*row.values(), flush=True)
    tried = [row for row in rows if row["outcome"] != "cannot be made"]
    dead = sum(row["outcome"] == "dies" for row in tried)
    print(f"{dead} of {len(tried)} breaks of {commit} die: {dead / len(tried):.1%}")


if __name__ == "__main__":
    main()
