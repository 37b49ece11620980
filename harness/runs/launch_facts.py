"""What readers below the launchers need of `launch.json`; `harness.launchers.launch` has all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict

from harness.runs.stored_files import STRICT


@dataclass(frozen=True)
class LaunchFacts:
    """Where and how an attempt ran; versions and tests that wrote less have the defaults.

    Attributes:
        launcher: `local` or `slurm`.
        site: the site's profile, or its name.
        oversubscribed: whether there were more ranks than CPUs.
        host: on which it was submitted.
        allocation: name of the allocation that several runs shared.
    """

    __pydantic_config__ = ConfigDict(**{**STRICT, "extra": "ignore"})
    launcher: str = ""
    site: dict[str, Any] | str | None = None
    oversubscribed: bool = False
    host: str = ""
    allocation: str | int | None = None
