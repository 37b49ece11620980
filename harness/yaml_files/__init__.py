"""Reads YAML files with line numbers, and words the errors about them. Imports no torch."""
