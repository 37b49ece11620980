"""Filter examples come from: folders, downloads, caches, archives, loaders and their order."""
