"""Phases of a step and the clocks that measure them."""
