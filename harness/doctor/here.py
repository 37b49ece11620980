"""Whether this host can run ranks itself, for sites with `launcher: local`."""

from __future__ import annotations

import os
import subprocess
import sys

from harness.doctor.findings import Finding, fault, ok, skipped, warning
from harness.errors import SiteError
from harness.launchers.local.launcher import site_cpus, site_gpus
from harness.launchers.rank_environment import kept_from_jobs
from harness.launchers.site import Site

# In a process of its own: importing it starts MPI.
_MPI_VERSION = "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0])"
_MPI_SECONDS = 60.0  # a cold file system
_OPEN_MPI = "Open MPI"


def examine_here(site: Site) -> list[Finding]:
    """CPUs, GPUs and the MPI library of this host, as the site's ranks would find them."""
    try:
        cpus, gpus = len(site_cpus(site)), len(site_gpus(site))
    except SiteError as error:
        return [fault("host: leases", str(error), f"correct it in the profile of site {site.name}")]
    library = _mpi_library() if site.backend == "mpi" else ("", "")
    return [judge_cpus(site, cpus), judge_gpus(site, gpus), judge_mpi_library(site, *library)]


def most_ranks(site: Site, most: int) -> int:
    """The ranks that fit on this host side by side, at least one and at most `most`."""
    room = most if site.oversubscribe else len(site_cpus(site)) // site.cpus_per_rank
    if site.gpus_per_rank:
        room = min(room, len(site_gpus(site)) // site.gpus_per_rank)
    return max(1, min(room, most))


def judge_cpus(site: Site, cpus: int) -> Finding:
    """Whether one rank gets its CPUs."""
    found = f"{cpus} for {site.cpus_per_rank} a rank"
    if cpus >= site.cpus_per_rank:
        return ok("host: CPUs", found)
    advice = f"set cpus_per_rank to {cpus} or fewer"
    if site.oversubscribe:
        return warning("host: CPUs", f"{found}; even one rank is oversubscribed", advice)
    return fault("host: CPUs", found, advice)


def judge_gpus(site: Site, gpus: int) -> Finding:
    """Whether one rank gets its GPU."""
    if not site.gpus_per_rank:
        return skipped("host: GPUs", "the site gives ranks none")
    found = f"{gpus} for {site.gpus_per_rank} a rank"
    if gpus >= site.gpus_per_rank:
        return ok("host: GPUs", found)
    return fault(
        "host: GPUs", found, "load the NVIDIA driver (nvidia-smi must list a GPU), or set gpus_per_rank: 0"
    )


def judge_mpi_library(site: Site, version: str, error: str) -> Finding:
    """Whether ranks that this host starts can be one MPI world.

    Args:
        site: has the backend.
        version: the library's own word, empty if there is none.
        error: why there is none.
    """
    if site.backend != "mpi":
        return skipped("host: MPI", f"the site's backend is {site.backend}")
    if not version:
        return fault("host: MPI", error, "install MPICH where mpi4py finds it: pip install mpich")
    if version.startswith(_OPEN_MPI):
        advice = (
            "pip install mpich, as the local launcher speaks to MPICH and its relatives, or use backend: gloo"
        )
        return fault("host: MPI", version, advice)
    return ok("host: MPI", version)


def _mpi_library() -> tuple[str, str]:
    environment = {name: value for name, value in os.environ.items() if not kept_from_jobs(name)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MPI_VERSION],
            env=environment, capture_output=True, text=True, check=False, timeout=_MPI_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"MPI did not start in {_MPI_SECONDS:.0f} s"
    said = done.stderr.strip().splitlines()
    if done.returncode:
        return "", said[-1] if said else f"starting MPI ended with {done.returncode}"
    return " ".join(done.stdout.strip().rstrip("\0").split()), ""
