"""The ranks of one run: their rendezvous, the communicator that connects them, and small all-gathers."""

from harness.training.world.rendezvous import all_gather_bytes
from harness.training.world.world import World, finalize_world, join_world

__all__ = ["World", "all_gather_bytes", "finalize_world", "join_world"]
