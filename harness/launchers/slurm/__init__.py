"""Jobs, arrays and steps of a cluster's Slurm."""
