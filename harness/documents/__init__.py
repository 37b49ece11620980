"""YAML files with line numbers, and the messages that refuse what is wrong in them. Imports no torch."""
