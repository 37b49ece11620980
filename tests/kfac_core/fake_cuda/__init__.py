"""Checks of what a step would do on a GPU, with tensors that have a device and no data."""
