"""What a login node may know of each workload: metrics, options, sizes. Imports no torch."""
