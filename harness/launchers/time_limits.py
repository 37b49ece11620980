"""Time limits of attempts, one or by world size."""

from __future__ import annotations

from math import inf
from typing import Annotated

from pydantic import BeforeValidator


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
