"""What a login node knows of each workload: options, metrics and sizes. Does not import torch."""
