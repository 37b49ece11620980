"""What is measured beside the phase timer: the run's clocks, traced steps, memory and the GPU."""
