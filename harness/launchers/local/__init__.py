"""Runs the ranks of an attempt on this host, on CPUs and GPUs that it has locked."""

from harness.launchers.local.launcher import LocalLauncher, site_cpus, site_gpus

__all__ = ["LocalLauncher", "site_cpus", "site_gpus"]
