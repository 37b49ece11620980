"""Runs attempts as steps of Slurm jobs, submitted through Submitit."""
