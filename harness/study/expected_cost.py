"""What cells will cost, from the time that completed cells took."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import reduce
from operator import add
from statistics import fmean

from harness.cell import Cell
from harness.launchers import LAUNCHERS
from harness.launchers.cost import CostEstimate
from harness.launchers.site_profile import Site


def expected_cost(
    cells: Sequence[Cell], taken: Sequence[tuple[Cell, float]], site: Site
) -> CostEstimate | None:
    """Cost of `cells` on `site` if they take as long as completed ones did; None if none has completed.

    A cell is expected to take the mean of the completed cells of its method and world size, else of its
    method, else of all.

    Args:
        cells: to be started.
        taken: completed cells with their seconds, of any site.
        site: where they will run.
    """
    if not taken:
        return None
    by_arm: dict[tuple[str, int] | str, list[float]] = defaultdict(list)
    for cell, seconds in taken:
        by_arm[cell.method, cell.world_size].append(seconds)
        by_arm[cell.method].append(seconds)
    overall = [seconds for _, seconds in taken]
    groups: dict[tuple[str, int], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.method, cell.world_size].append(cell)
    costs = []
    for (method, world_size), group in groups.items():
        found = by_arm.get((method, world_size)) or by_arm.get(method) or overall
        most = site.limit_minutes(world_size) * (site.max_continuations + 1)
        minutes = min(fmean(found) / 60, most)
        limited = site.model_copy(update={"timeout_minutes": minutes, "max_continuations": 0})
        costs.append(LAUNCHERS[site.launcher].estimate_cost(group, limited))
    return reduce(add, costs, CostEstimate())
