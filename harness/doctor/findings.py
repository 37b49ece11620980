"""The result of an examination: one finding per check."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "fault", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        state: a fault breaks runs or falsifies their numbers, a warning may do so.
        found: what was found; the reason if the check was skipped.
        advice: what to do about it; empty if there is nothing to do.
    """

    check: str
    state: State
    found: str
    advice: str = ""


def ok(check: str, found: str) -> Finding:
    """The check passed."""
    return Finding(check, "ok", found)


def warning(check: str, found: str, advice: str) -> Finding:
    """Runs will start, but may fail or be slow."""
    return Finding(check, "warning", found, advice)


def fault(check: str, found: str, advice: str) -> Finding:
    """Runs will not start, will fail, or will measure something else."""
    return Finding(check, "fault", found, advice)


def skipped(check: str, reason: str) -> Finding:
    """The check was not made."""
    return Finding(check, "skipped", reason)


def any_fault(findings: Iterable[Finding]) -> bool:
    """Whether a finding is a fault: the site should not be used as it is."""
    return any(one.state == "fault" for one in findings)


def in_bytes(size: float) -> str:
    """Bytes with a unit: `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
