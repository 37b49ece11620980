"""The run folder: its files, records, locks and checkpoints on disk. Imports no torch."""
