"""Sweep files, filters, papers, submission and status. Imports no torch."""
