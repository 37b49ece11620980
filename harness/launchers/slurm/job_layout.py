"""Layout of cells in jobs: nodes and ranks of a cell, slots of cells in a job, jobs in an array.

A job has one or more slots side by side; the cells of a slot run one after another. Jobs with equal layouts
form one array.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from harness.cell import Cell
from harness.errors import SiteError
from harness.launchers.cost import CostEstimate
from harness.launchers.site_profile import Site
from harness.launchers.slurm_profile import START_MINUTES, SlurmProfile
from harness.runs.stored_files import STRICT, Positive

Item = TypeVar("Item")
Job = Sequence[Sequence[Item]]
"""Slots of cells or attempts."""


@dataclass(frozen=True)
class JobLayout:
    """Resources of a job; jobs with equal layouts share an array.

    Attributes:
        world_size: ranks of each of its cells.
        nodes: of one cell, and so of a job, because slots share the nodes.
        slots: cells side by side.
        length: most cells in a slot.
    """

    __pydantic_config__ = STRICT
    world_size: Positive
    nodes: Positive
    slots: Positive
    length: Positive

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one cell on a node."""
        return self.world_size // self.nodes

    def minutes(self, site: Site) -> int:
        """Time limit of a job, in which each of its cells can use all of its own limit."""
        return math.ceil(self.length * site.limit_minutes(self.world_size)) + START_MINUTES

    def memory_mb(self, site: Site, slots: int) -> int | None:
        """Memory on each node for `slots` of the slots; None to request nothing."""
        profile = slurm(site)
        if profile.memory_gb_per_node is None:
            return None
        share = min(1.0, slots * self.ranks_per_node / profile.ranks_per_node)
        return math.floor(1024 * profile.memory_gb_per_node * share)

    def estimate_cost(self, site: Site) -> CostEstimate:
        """Upper bound of the cost of one start of a job: its time limit times all that it holds."""
        profile = slurm(site)
        hours = self.minutes(site) / 60
        ranks = self.world_size * self.slots
        cpus, gpus = ranks * site.cpus_per_rank, ranks * site.gpus_per_rank
        if profile.exclusive:
            cpus = self.nodes * (profile.cpus_per_node or cpus // self.nodes)
            gpus = self.nodes * (profile.gpus_per_node or gpus // self.nodes)
        return CostEstimate(
            gpu_hours=gpus * hours, core_hours=cpus * hours, requeued=profile.requeue,
            jobs=1, largest_ranks=ranks, largest_nodes=self.nodes, continuations=site.max_continuations,
        )  # fmt: skip


def slurm(site: Site) -> SlurmProfile:
    """The profile's `slurm:` section.

    Raises:
        SiteError: it has none.
    """
    if site.slurm is None:
        raise SiteError(
            f"site {site.name} has launcher: slurm but no slurm: section; it needs ranks_per_node"
        )
    return site.slurm


def nodes_of(world_size: int, ranks_per_node: int) -> int:
    """The fewest nodes that `world_size` ranks fill equally, at most `ranks_per_node` on each."""
    fewest = math.ceil(world_size / ranks_per_node)
    return next(nodes for nodes in range(fewest, world_size + 1) if world_size % nodes == 0)


def lay_out(items: Iterable[tuple[Item, Cell]], site: Site) -> dict[JobLayout, list[Job[Item]]]:
    """Jobs by layout, in the order of the cells.

    Args:
        items: what to run, with its cell.
        site: its profile decides which cells share a job.
    """
    profile = slurm(site)
    slots: dict[object, list[Item]] = {}
    sizes: dict[object, int] = {}
    for number, (item, cell) in enumerate(items):
        key: object = (cell.world_size, cell.seed) if profile.pair_arms else number
        slots.setdefault(key, []).append(item)
        sizes[key] = cell.world_size
    by_size: dict[int, list[list[Item]]] = defaultdict(list)
    for block, slot in slots.items():
        by_size[sizes[block]].append(slot)
    jobs: dict[JobLayout, list[Job[Item]]] = defaultdict(list)
    for world_size, found in by_size.items():
        nodes = nodes_of(world_size, profile.ranks_per_node)
        for start in range(0, len(found), profile.cells_per_job):
            together = found[start : start + profile.cells_per_job]
            jobs[JobLayout(world_size, nodes, len(together), max(map(len, together)))].append(together)
    return dict(jobs)
