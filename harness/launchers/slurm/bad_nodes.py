"""Nodes that failed repeatedly under cells; new jobs exclude them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from harness.launchers.launch import Launch
from harness.launchers.slurm.job_layout import slurm
from harness.runs.store import Attempt

ENOUGH = 2  # one failure is chance; a node that fails twice under one sweep would fail every retry


def bad_nodes(attempts: Iterable[Attempt]) -> tuple[str, ...]:
    """Nodes that failed at least `ENOUGH` times under earlier attempts at the same cells."""
    outcomes = (earlier.outcome() for one in attempts for earlier in one.cell_folder.attempts())
    failures = Counter(node for outcome in outcomes if outcome for node in outcome.failed_nodes)
    return tuple(sorted(node for node, count in failures.items() if count >= ENOUGH))


def exclude_bad_nodes(launches: Mapping[Attempt, Launch]) -> dict[Attempt, Launch]:
    """The launches with the bad nodes added to the nodes that their site excludes."""
    bad = bad_nodes(launches)
    if not bad:
        return dict(launches)
    site = next(iter(launches.values())).site
    profile = slurm(site)
    excluded = tuple(sorted({*profile.exclude_nodes, *bad}))
    changed = site.model_copy(update={"slurm": profile.model_copy(update={"exclude_nodes": excluded})})
    return {one: launch.model_copy(update={"site": changed}) for one, launch in launches.items()}
