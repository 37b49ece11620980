"""What is measured beside the phase timer: the run's clocks, traced steps, memory, load and the GPU."""
