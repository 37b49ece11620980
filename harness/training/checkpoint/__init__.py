"""Checkpoints: agreed on by all ranks, written whole or not at all, gone on from bit for bit."""
