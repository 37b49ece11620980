"""Floor 2: runs studies."""
