"""Gram matrices of a convolution's patches."""
