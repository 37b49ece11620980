"""The ranks of one run: their rendezvous, the communicator that connects them, and small all-gathers."""

from harness.training.world.all_gather import all_gather_bytes, all_gather_rows
from harness.training.world.world import World, finalize_world, host_names, join_world

__all__ = ["World", "all_gather_bytes", "all_gather_rows", "finalize_world", "host_names", "join_world"]
