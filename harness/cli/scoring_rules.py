"""The option `--rule`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.errors import UserError
from harness.yaml_files.validation_messages import not_allowed

if TYPE_CHECKING:
    from analysis.rules import Scoring

ABOUT_RULES = "Rule of time to accuracy: first, sustained, wall, mlperf-style or algoperf-style."


def read_rule(rule: str) -> Scoring:
    """The rule of that name.

    Raises:
        UserError: there is none, or it has another name now.
    """
    from analysis.rules import RENAMED, SCORINGS  # noqa: PLC0415  loads pandas, which --help need not

    if rule in RENAMED:
        now = RENAMED[rule]
        raise UserError(
            f"--rule={rule!r} is called {now} now; beyond it the benchmark requires more: the rule "
            f"has {SCORINGS[now].lacks}"
        )
    if rule not in SCORINGS:
        raise UserError(f"--rule={rule!r} is not a rule{not_allowed(rule, SCORINGS)}")
    return SCORINGS[rule]
