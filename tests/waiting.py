"""Waiting for what other processes do, with an end."""

import time
from typing import Any


def wait_for(condition: Any, seconds: float = 120) -> Any:
    """The first true value that `condition` gives."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError(f"still waiting after {seconds} s")
