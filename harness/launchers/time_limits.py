"""Time limits of attempts, one or by world size, and settings that cannot act within them."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import TYPE_CHECKING, Annotated

from pydantic import BeforeValidator

from harness.launchers.slurm_profile import START_MINUTES

if TYPE_CHECKING:
    from harness.launchers.site_profile import Site
    from harness.yaml_files.document import Place


def _checked(value: object) -> object:
    """One limit, or limits by world size with numbers as keys, which JSON has as text."""
    if not isinstance(value, dict):
        return _minutes(value, "")
    if not value:
        raise ValueError("must have a limit for at least one world size")
    return {
        _world_size(size): _minutes(minutes, f" for world size {size}") for size, minutes in value.items()
    }


def _minutes(value: object, of: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        allowed = "must be a number > 0" if of else "must be a number > 0, or such numbers by world size"
        raise ValueError(f"{allowed}, got {value!r}{of}")
    return float(value)


def _world_size(value: object) -> int:
    if not str(value).isdecimal() or int(str(value)) < 1:
        raise ValueError(f"must have world sizes as keys, whole numbers >= 1, got {value!r}")
    return int(str(value))


TimeLimits = Annotated[float | dict[int, float], BeforeValidator(_checked)]
"""Minutes, for every world size or by world size."""


def cannot_act(site: Site) -> Iterator[tuple[Place, str]]:
    """Settings that can never act within the time limits, each with the rest of a sentence about it."""
    limits = site.limits_minutes
    shortest, longest = min(limits), max(limits)
    if site.grace_seconds > shortest * 30:
        yield (
            ("grace_seconds",),
            f"={site.grace_seconds:g} is more than half of timeout_minutes={shortest:g}, and ranks are "
            f"asked to save in the second half only; use at most {shortest * 30:g}",
        )
    for name in ("checkpoint_every_minutes", "rendezvous_minutes", "peer_minutes", "staging_minutes"):
        minutes = getattr(site, name)
        if minutes is not None and minutes >= longest:
            yield (
                (name,),
                f"={minutes:g} cannot act: an attempt ends after timeout_minutes={longest:g}; use less, or "
                "leave it out",
            )
    if site.slurm is not None and site.max_continuations and not site.slurm.requeue:
        yield (
            ("max_continuations",),
            f"={site.max_continuations} cannot act with slurm.requeue=false: a run continues in its own job, "
            "which Slurm starts again",
        )
    if site.slurm is not None and site.slurm.signal_seconds is not None:
        yield from _useless_signal(site, site.slurm.signal_seconds)


def _useless_signal(site: Site, seconds: int) -> Iterator[tuple[Place, str]]:
    """A signal of Slurm that comes after the launcher's own, or as soon as the job starts."""
    asked = START_MINUTES * 60 + min(min(site.grace_seconds, limit * 30) for limit in site.limits_minutes)
    most = min(site.limits_minutes) * 60
    if seconds <= asked:
        yield (
            ("slurm", "signal_seconds"),
            f"={seconds} cannot act: ranks are asked to save {asked:g} s before the end of their job, "
            f"which is grace_seconds before timeout_minutes, and Slurm's limit is {START_MINUTES} minutes "
            "later; use more, or leave it out",
        )
    elif seconds >= most:
        yield (
            ("slurm", "signal_seconds"),
            f"={seconds} would end a job as soon as it starts: timeout_minutes is {most:g} s; use less",
        )
