"""Simulates the table of coverage: `make coverage`, or as follows.

    python -m jobs.experiments.coverage results/coverage

This writes `results/coverage.csv` and `results/coverage.md`. Seeds are fixed: the same versions write the
same bytes, with any number of processes. `--only TEXT` makes the rows whose name contains a text and keeps
the others; without a path it writes nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from jobs.experiments.coverage.cases import rows
from jobs.experiments.coverage.page import page
from jobs.experiments.coverage.table import SHARES, line, read_csv, write_csv


def main() -> None:
    """Simulate all rows and write the table and its page, or print some rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", type=Path, nargs="?", help="path of the table without its suffix")
    parser.add_argument("--only", default="", help="show the rows whose name contains this text")
    parser.add_argument("--processes", type=int, default=1, help="that simulate rows at the same time")
    options = parser.parse_args()
    if not options.only and options.table is None:
        parser.error("needs the path of the table, or --only")
    chosen = [row for row in rows() if options.only in row.name]
    lines = []
    started = time.monotonic()
    with ProcessPoolExecutor(options.processes) as pool:
        for number, (row, found) in enumerate(zip(chosen, pool.map(line, chosen), strict=True), start=1):
            said = ", ".join(f"{name} {found[name]}" for name in SHARES if found[name])
            took = time.monotonic() - started
            print(
                f"{number} of {len(chosen)}, {took:.0f} s: {row.name}: {found['finding']}; {said}",
                file=sys.stderr,
            )
            lines.append(found)
    if options.table is not None:
        made = {row.name: found for row, found in zip(chosen, lines, strict=True)}
        kept = read_csv(options.table.with_suffix(".csv")) if options.only else {}
        table = [made.get(row.name) or kept[row.name] for row in rows()]
        write_csv(table, options.table.with_suffix(".csv"))
        options.table.with_suffix(".md").write_text(page(table))


if __name__ == "__main__":
    main()
