"""Merges run folders of several machines into one, without ever changing what is there."""

from harness.runs.collection.merge import Merged, merge
from harness.runs.collection.mirror import is_remote, mirrored

__all__ = ["Merged", "is_remote", "merge", "mirrored"]
