"""The run folder: its files, records, locks and checkpoints. Imports no torch."""
