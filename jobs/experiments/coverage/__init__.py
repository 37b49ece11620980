"""How often the statistics of `analysis` are right, on simulated studies whose answer is known."""
