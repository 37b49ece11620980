"""Shared by the workloads: data folders, downloads, caches, tokenizers, sampling and loading of examples."""
