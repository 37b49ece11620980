"""Checks of this host, for sites with `launcher: local`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from harness.doctor.findings import Finding, fault, ok, skipped, warning
from harness.errors import SiteError
from harness.launchers.local import site_cpus, site_gpus
from harness.launchers.rank_environment import hidden_from_jobs
from harness.launchers.site_profile import Site

# In a process of its own: importing it starts MPI.
_MPI_VERSION = "from mpi4py import MPI; print(MPI.Get_library_version().splitlines()[0])"
_MPI_SECONDS = 60.0  # a cold file system


def check_local_host(site: Site) -> list[Finding]:
    """Check CPUs, GPUs and the MPI library that the site's ranks would use."""
    try:
        cpus, gpus = len(site_cpus(site)), len(site_gpus(site))
    except SiteError as error:
        return [fault("host: leases", str(error), f"correct it in the profile of site {site.name}")]
    library = _mpi_library() if site.backend == "mpi" else ("", "")
    of_mpi = check_mpi_library(site, *library)
    return [check_cpus(site, cpus), check_gpus(site, gpus), check_programs(site), of_mpi]


def most_ranks(site: Site, most: int) -> int:
    """How many ranks fit on this host at once, at least one and at most `most`."""
    fitting = most if site.oversubscribe else len(site_cpus(site)) // site.cpus_per_rank
    if site.gpus_per_rank:
        fitting = min(fitting, len(site_gpus(site)) // site.gpus_per_rank)
    return max(1, min(fitting, most))


def check_cpus(site: Site, cpus: int) -> Finding:
    """Whether there are enough CPUs for one rank."""
    found = f"{cpus} for {site.cpus_per_rank} a rank"
    if cpus >= site.cpus_per_rank:
        return ok("host: CPUs", found)
    advice = f"set cpus_per_rank to {cpus} or fewer"
    if site.oversubscribe:
        return warning("host: CPUs", f"{found}; even one rank is oversubscribed", advice)
    return fault("host: CPUs", found, advice)


def check_gpus(site: Site, gpus: int) -> Finding:
    """Whether there are enough GPUs for one rank."""
    if not site.gpus_per_rank:
        return skipped("host: GPUs", "the site assigns none to its ranks")
    found = f"{gpus} for {site.gpus_per_rank} a rank"
    if gpus >= site.gpus_per_rank:
        return ok("host: GPUs", found)
    return fault(
        "host: GPUs", found, "load the NVIDIA driver (nvidia-smi must list a GPU), or set gpus_per_rank: 0"
    )


def check_programs(site: Site) -> Finding:
    """Whether this host has the program that ranks are started with: the prefix's, or the site's Python."""
    check, field = "host: programs", "launch_prefix" if site.launch_prefix else "python"
    program = site.launch_prefix[0] if site.launch_prefix else site.python or sys.executable
    if shutil.which(program) is None:
        found = f"{field}: {program} is not a program on this host's PATH"
        return fault(check, found, f"correct {field} of site {site.name}, or load its module")
    return ok(check, program)


def check_mpi_library(site: Site, version: str, error: str) -> Finding:
    """Whether ranks started on this host can be one MPI world; `error` says why there is no version."""
    if site.backend != "mpi":
        return skipped("host: MPI", f"the site's backend is {site.backend}")
    if not version:
        return fault("host: MPI", error, "install MPICH where mpi4py finds it: pip install mpich")
    if version.startswith("Open MPI"):
        advice = (
            "pip install mpich, as the local launcher supports MPICH and its relatives, or use backend: gloo"
        )
        return fault("host: MPI", version, advice)
    return ok("host: MPI", version)


def _mpi_library() -> tuple[str, str]:
    environment = {name: value for name, value in os.environ.items() if not hidden_from_jobs(name)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MPI_VERSION],
            env=environment, capture_output=True, text=True, check=False, timeout=_MPI_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "", f"MPI did not start in {_MPI_SECONDS:.0f} s"
    errors = done.stderr.strip().splitlines()
    if done.returncode:
        return "", errors[-1] if errors else f"starting MPI failed with exit code {done.returncode}"
    return " ".join(done.stdout.strip().rstrip("\0").split()), ""
