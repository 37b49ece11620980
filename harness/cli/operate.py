"""The verbs that act on runs: submit, run, status, logs, cancel, retry."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the verbs to `app`."""
