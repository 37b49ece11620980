"""Strict YAML files with line numbers, and error messages about their content. Imports no torch."""
