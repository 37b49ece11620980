"""Runs the ranks of an attempt on this host, on leased CPUs and GPUs."""
