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
        grace_seconds: what ranks get to save a checkpoint in when they are asked to stop, and how long before
            the time limit they are asked; at most half of it.
        checkpoint_every_epochs: save at the start of every so many epochs; None for never.
        checkpoint_every_minutes: save after every so many minutes; None for never.
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
    grace_seconds: float = Field(default=60.0, gt=0)
    checkpoint_every_epochs: int | None = Field(default=None, ge=1)
    checkpoint_every_minutes: float | None = Field(default=None, gt=0)
    environment: dict[str, str] = {}
