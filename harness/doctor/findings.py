"""What an examination says of a site, one finding a check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "fault", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One check.

    Attributes:
        state: a fault will break runs or spoil their numbers, a warning may.
        found: what is there; where skipped, why.
        advice: what to do about it; empty where nothing is to be done.
    """

    check: str
    state: State
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    """All well."""
    return Finding(check, "ok", found)


def warning(check: str, found: str, advice: str) -> Finding:
    """Runs will start, and may suffer from it."""
    return Finding(check, "warning", found, advice)


def fault(check: str, found: str, advice: str) -> Finding:
    """Runs will not start, will fail, or will measure something else."""
    return Finding(check, "fault", found, advice)


def skipped(check: str, reason: str) -> Finding:
    """Not looked at."""
    return Finding(check, "skipped", reason)


def any_fault(findings: Iterable[Finding]) -> bool:
    """Whether the site should not be used as it is."""
    return any(one.state == "fault" for one in findings)


def in_bytes(size: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
