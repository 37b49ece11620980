"""Statistics of a few runs: intervals, tests and performance profiles over plain numbers."""
