"""Gradients in flat buffers, and the kl-clip that scales them."""
