"""What is measured beside the phase timer: traced steps, memory, load and the GPU."""
