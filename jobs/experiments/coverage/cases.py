"""The cases of the table: what is simulated, and with how many runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jobs.experiments.coverage.rules import reference_points_of, scores_of
from jobs.experiments.coverage.simulation import Result, comparisons_of, levels_of, trends_of
from jobs.experiments.coverage.studies import NOISE, Design

BLOCKS = "speed-up, arms in blocks"
UNPAIRED = "speed-up, no blocks"
LEVEL = "level of one arm"
TREND = "test for drift"
RULE = "rule"

Simulate = Callable[[np.random.Generator, int], Result]


@dataclass(frozen=True)
class Row:
    """A row of the table: a case at one number of runs.

    Attributes:
        group: what is estimated, and from which design.
        case: what disturbs it.
        runs: of every arm; `4 and 8` if the baseline has 8.
        comparisons: family of Holm's correction.
        simulate: makes the result from a generator and a number of studies.
        block_design: whether its arms are in blocks, so that the tool has to get it right.
    """

    group: str
    case: str
    runs: str
    comparisons: int
    simulate: Simulate
    block_design: bool = True

    @property
    def name(self) -> str:
        """Names the row's random generator, too."""
        return row_name(self.group, self.case, self.runs, self.comparisons)


def row_name(group: str, case: str, runs: str, comparisons: int | str) -> str:
    """Of a row, from its columns."""
    return f"{group}; {case}; {runs} runs; {comparisons} comparisons"


def rows() -> list[Row]:
    """All rows of the table, in its order."""
    return [*_in_blocks(), *_families(), *_unpaired(), *_levels(), *_trends(), *_rules()]


SIZES = (4, 5, 6, 8, 10, 20)
SOME = (4, 6, 12)


def _in_blocks() -> Iterable[Row]:
    for noise in NOISE:
        yield from _compare(
            BLOCKS, noise, SIZES if noise in ("log-normal", "two speeds") else SOME, noise=noise
        )
    yield from _compare(BLOCKS, "half of the blocks twice as slow", SOME, block_speeds=True)
    yield from _compare(BLOCKS, "the arm scatters 4 times as much", SOME, scatter=(4, 1))
    yield from _compare(BLOCKS, "the arm scatters 10 times as much", SOME, scatter=(10, 1))
    yield from _compare(BLOCKS, "drift, each run 5 % longer", SOME, drift=0.05)
    yield from _compare(BLOCKS, "drift, each run 30 % longer", SOME, drift=0.3)
    yield from _compare(BLOCKS, "the second run of a block 20 % longer", SIZES, place=0.2)
    yield from _compare(BLOCKS, "AR(0.8) load within blocks", SIZES, load=0.15, block_scatter=0.0)
    yield from _compare(BLOCKS, "one order in every block, 20 % drift", SOME, order="fixed", drift=0.2)
    for share in (0.2, 0.4):
        called = f"{share:.0%} interrupted".replace("%", " %")
        yield from _compare(BLOCKS, called, (4, 6, 8, 12, 20), interrupted=share)
        yield from _compare(
            BLOCKS, f"{called}, long runs more often", (6, 12), interrupted=share, hazard=True
        )
        yield from _compare(BLOCKS, f"{called}, AR(0.8) load", (6, 12), interrupted=share, load=0.15)
        yield from _compare(BLOCKS, f"{called}, two speeds", (6, 12), interrupted=share, noise="two speeds")
    for share in (0.1, 0.25):
        called = f"{share:.0%} miss the target".replace("%", " %")
        yield from _compare(BLOCKS, called, SOME, missed=share)
    for share in (0.05, 0.2):
        called = f"a time limit ends {share:.0%}".replace("%", " %")
        yield from _compare(BLOCKS, called, SOME, timed_out=share)


def _families() -> Iterable[Row]:
    for noise in ("log-normal", "two speeds"):
        for family, sizes in ((3, (4, 5, 6, 9)), (12, (5, 6, 9, 12))):
            yield from _compare(BLOCKS, noise, sizes, noise=noise, comparisons=family)
    yield from _compare(BLOCKS, "AR(0.8) load within blocks", (5, 9), load=0.15, block_scatter=0.0,
                        comparisons=3)  # fmt: skip
    yield from _compare(BLOCKS, "20 % interrupted", (6, 9), interrupted=0.2, comparisons=3)
    yield from _compare(BLOCKS, "40 % interrupted", (9, 15), interrupted=0.4, comparisons=3)
    yield from _compare(BLOCKS, "40 % interrupted", (15,), interrupted=0.4, comparisons=12)
    for family, sizes in ((3, (4, 5, 9)), (12, (9,))):
        yield from _compare(
            UNPAIRED, "log-normal", sizes, comparisons=family, blocks=False, block_design=False
        )


def _unpaired() -> Iterable[Row]:
    compare = partial(_compare, UNPAIRED, blocks=False, block_design=False)
    for noise in NOISE:
        yield from compare(noise, SIZES if noise in ("log-normal", "two speeds") else SOME, noise=noise)
    unequal = ((4, 8), (8, 4), (4, 20), (20, 6))
    for noise in ("log-normal", "two speeds"):
        yield from compare(f"unequal n, {noise}", unequal, noise=noise)
    for times in (4, 10):
        for scatter in ((times, 1), (1, times)):
            which = "arm" if scatter[0] > 1 else "baseline"
            yield from compare(f"the {which} scatters {times} times as much", SOME, scatter=scatter)
            yield from compare(
                f"unequal n, the {which} scatters {times} times as much", unequal[:3], scatter=scatter
            )
    yield from compare("all runs at once, two speeds", SOME, order="at once", noise="two speeds")
    yield from compare("drift, each run 5 % longer", SOME, drift=0.05)
    yield from compare("AR(0.8) load", SOME, load=0.15)
    yield from compare("arm after arm, 5 % drift", SOME, drift=0.05, order="arm after arm")
    yield from compare("arm after arm, AR(0.8) load", SOME, load=0.15, order="arm after arm")
    for share in (0.2, 0.4):
        yield from compare(f"{share:.0%} interrupted".replace("%", " %"), (6, 12), interrupted=share)
    for share in (0.1, 0.25):
        yield from compare(f"{share:.0%} miss the target".replace("%", " %"), SOME, missed=share)


def _compare(
    group: str,
    case: str,
    sizes: Iterable[int | tuple[int, int]],
    block_design: bool = True,
    **options: Any,
) -> Iterable[Row]:
    for size in sizes:
        runs = (size, size) if isinstance(size, int) else size
        design = Design(runs, **options)
        simulate = partial(comparisons_of, design)
        yield Row(group, case, _named(runs), design.comparisons, simulate, block_design)


def _named(runs: tuple[int, int]) -> str:
    return str(runs[0]) if runs[0] == runs[1] else f"{runs[0]} and {runs[1]}"


def _levels() -> Iterable[Row]:
    plain = Design((0, 0), blocks=False)
    sizes = (4, 5, 6, 7, 8, 9, 10, 20)
    for noise in NOISE:
        yield from _level(noise, sizes if noise in ("log-normal", "two speeds far apart") else (5, 6, 8, 12),
                          replace(plain, noise=noise))  # fmt: skip
    for share in (0.1, 0.25):
        called = f"{share:.0%} miss the target".replace("%", " %")
        yield from _level(called, (5, 6, 8, 12), replace(plain, missed=share))
    for share in (0.2, 0.4):
        called = f"{share:.0%} interrupted".replace("%", " %")
        yield from _level(called, (6, 8, 12, 20), replace(plain, interrupted=share))
    loaded = Design((0, 0), load=0.15, block_scatter=0.0)
    yield from _level("AR(0.8) load, the median of any time", (5, 6, 12), loaded)
    yield from _level("AR(0.8) load, the median under the study's own load", (5, 6, 12), loaded, own=True)


def _level(case: str, sizes: Iterable[int], design: Design, own: bool = False) -> Iterable[Row]:
    for size in sizes:
        simulate = partial(levels_of, replace(design, runs=(size, size)), own=own)
        yield Row(LEVEL, case, str(size), 1, simulate)


def _trends() -> Iterable[Row]:
    for noise in ("log-normal", "two speeds"):
        for size in (4, 6, 12, 20):
            design = Design((size, size), noise=noise, block_scatter=0.0)
            yield Row(TREND, noise, str(size), 1, partial(trends_of, design))


def _rules() -> Iterable[Row]:
    for rule in ("first", "sustained", "wall", "mlperf-style", "algoperf-style"):
        yield Row(RULE, rule, "6", 1, partial(scores_of, rule, 6))
    yield Row(RULE, "sustained, runs end at the target", "6", 1,
              partial(scores_of, "sustained", 6, stops=True))  # fmt: skip
    for size in (5, 10):
        yield Row(RULE, "MLPerf's reference point", f"{size} and {2 * size}", 1,
                  partial(reference_points_of, size))  # fmt: skip
