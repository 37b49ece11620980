"""Shared by the workloads: data folders, images, downloads, caches, staging and tokenizers."""
