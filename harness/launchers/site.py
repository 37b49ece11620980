"""A site: where ranks run. Cluster facts live here and never in a sweep."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from harness.cell import Spec


class Site(Spec):
    """A site profile, `jobs/sites/<name>.yaml`.

    Attributes:
        launcher: key of `harness.launchers.LAUNCHERS`.
        cpus: CPU leases on this host; None takes every CPU that this process may use.
        gpus: GPU leases on this host; None takes what the driver shows.
        cpus_per_rank: CPUs leased, pinned and given as threads to each rank.
        gpus_per_rank: GPUs leased to each rank, 0 or 1.
        oversubscribe: whether a cell that needs more CPUs than the site has may run with all of them,
            alone and marked as oversubscribed; otherwise it is refused.
        timeout_minutes: an attempt that runs longer is ended with TIMEOUT.
        environment: extra variables for the ranks.
    """

    name: str
    launcher: Literal["local"] = "local"
    cpus: int | None = Field(default=None, ge=1)
    gpus: int | None = Field(default=None, ge=0)
    cpus_per_rank: int = Field(default=1, ge=1)
    gpus_per_rank: Literal[0, 1] = 0
    oversubscribe: bool = False
    timeout_minutes: float = Field(default=60.0, gt=0)
    environment: dict[str, str] = {}
