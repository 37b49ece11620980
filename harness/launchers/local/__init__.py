"""Runs the ranks of an attempt on this host, on leased CPUs and GPUs."""

from harness.launchers.local.launcher import LocalLauncher, site_cpus, site_gpus

__all__ = ["LocalLauncher", "site_cpus", "site_gpus"]
