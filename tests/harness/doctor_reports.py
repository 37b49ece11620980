"""Reports of four ranks on two hosts, and what doctor finds in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.doctor.findings import Finding
from harness.doctor.ranks import Report, check_ranks
from harness.launchers.launch import Launch
from harness.launchers.site_profile import Site
from harness.launchers.slurm_profile import SlurmProfile

RANK = Report(
    0, "a", "/bin/python", {"python": "3.11.7", "torch": "2.6", "commit": "abc"}, "", (), (0,),
    backend="gloo", all_reduce_seconds=4e-3,
)  # fmt: skip


def make_site(launcher: str = "slurm", **fields: Any) -> Site:
    profile = SlurmProfile(ranks_per_node=2) if launcher == "slurm" else None
    return Site(name="test", launcher=launcher, slurm=profile, **fields)


def findings(ranks: dict[int, dict[str, Any]], site: Site | None = None, **launch: Any) -> dict[str, Finding]:
    """Findings by check for four ranks on two hosts, with the changes that `ranks` has for each of them."""
    site = site or make_site()
    fields = {"launcher": site.launcher, "site": site, "cpus_per_rank": site.cpus_per_rank} | launch
    own = [{"rank": rank, "node": "ab"[rank // 2], "cpus": (rank % 2,)} for rank in range(4)]
    reports = [replace(RANK, **{**own[rank], **ranks.get(rank, {})}) for rank in range(4)]
    found = check_ranks(reports, Launch(host="", user="", submitted_at=0.0, **fields), 4)
    assert all(one.advice for one in found if one.state in ("warning", "fault"))
    return {one.check.removeprefix("ranks: "): one for one in found}
