"""Runs studies: sweeps of training runs, on this host or under Slurm."""
