"""Shows what cells will cost, and asks before they cost much."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import typer

from harness.errors import CostlyError

if TYPE_CHECKING:
    from harness.launchers.cost import CostEstimate

T = TypeVar("T")


def with_consent(start: Callable[[float | None, bool], T], budget: float | None, *, yes: bool) -> T:
    """Call `start`, and again if it refuses a high cost and the user agrees to that cost.

    Args:
        start: gets a budget, and whether it has to refuse a cost that nobody has agreed to.
        budget: of the command line.
        yes: whether the user agrees to any cost.

    Raises:
        CostlyError: nobody can be asked.
        typer.Abort: the user does not agree.
    """
    try:
        return start(budget, not yes)
    except CostlyError as error:
        if not (sys.stdin.isatty() and sys.stdout.isatty()):
            raise
        typer.echo(str(error).partition("; above ")[0], err=True)
        typer.confirm("Submit it?", abort=True, err=True)
        return start(error.hours, False)


def cost_in_words(cost: CostEstimate, expected: CostEstimate | None) -> str:
    """Such as `36 jobs, the largest of 4 ranks on 1 node; at most 84 core-hours, about 0.3 expected`."""
    if expected is None:
        about = "what to expect is known when a run has completed"
    else:
        about = f"{expected.hours} expected, from completed runs"
    return f"{cost.sizes}; {cost}; {about}"
