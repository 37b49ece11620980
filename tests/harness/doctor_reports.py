"""Reports of four ranks on two hosts, and what doctor finds in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.doctor.findings import Finding
from harness.doctor.ranks import check_ranks
from harness.doctor.reports import Report, WorldReport
from harness.launchers.launch import Launch
from harness.launchers.site_profile import Site
from harness.launchers.slurm_profile import SlurmProfile

GIB = 1 << 30
TOGETHER = WorldReport("gloo", 0.5, "no process manager", "", "", 1e-4, 4e-3, (1e9, 1e9 + 9, 1e9 + 10), 0.01)
RANK = Report(
    rank=0, local_rank=0, host="a", node="a", versions={"python": "3.11.7", "torch": "2.6", "commit": "abc"},
    device="cpu", device_id="", gpus=(), driver=None, nccl="", no_nccl="no GPU", cpus=(0,), threads=1,
    memory_limit_bytes=None, address_space_bytes=None, locked_memory_bytes=None, shared_memory_bytes=8 * GIB,
    exchange=TOGETHER,
)  # fmt: skip


def make_site(launcher: str = "slurm", slurm: dict[str, Any] | None = None, **fields: Any) -> Site:
    profile = SlurmProfile(**{"ranks_per_node": 2, **(slurm or {})}) if launcher == "slurm" else None
    return Site(name="test", launcher=launcher, slurm=profile, **fields)


def findings(ranks: dict[int, dict[str, Any]], site: Site | None = None, **launch: Any) -> dict[str, Finding]:
    """Findings by check for four ranks on two hosts, with the changes that `ranks` has for each of them."""
    site = site or make_site()
    fields = {
        "launcher": site.launcher,
        "site": site,
        "cpus_per_rank": site.cpus_per_rank,
        "host": "",
        "user": "",
    }
    reports = []
    for rank in range(4):
        host, changes = "ab"[rank // 2], dict(ranks.get(rank, {}))
        together = changes.pop("exchange", {})
        changes["exchange"] = replace(TOGETHER, **together) if together is not None else None
        own = {"rank": rank, "local_rank": rank % 2, "host": host, "node": host, "cpus": (rank % 2,)}
        reports.append(replace(RANK, **{**own, **changes}))
    found = check_ranks(reports, Launch(**{**fields, "submitted_at": 0.0, **launch}), 4)
    assert all(one.advice for one in found if one.state in ("warning", "fault"))
    return {one.check.removeprefix("ranks: "): one for one in found}


def all_ranks(**changes: Any) -> dict[int, dict[str, Any]]:
    return dict.fromkeys(range(4), changes)
