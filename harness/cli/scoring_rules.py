"""The options `--rule` and `--target`: how stored runs are scored."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from harness.errors import UserError
from harness.yaml_files.validation_messages import not_allowed

if TYPE_CHECKING:
    from analysis.records.study import Study
    from analysis.rules import Scoring

ABOUT_RULES = "Rule of time to accuracy: first, sustained, wall, mlperf-style or algoperf-style."

Rule = Annotated[str, typer.Option("--rule", metavar="NAME", help=ABOUT_RULES)]
OtherTarget = Annotated[
    float | None,
    typer.Option(
        "--target", metavar="VALUE", help="Score the same runs by this value of the target's metric: 0.97."
    ),
]


def scored(study: Study, rule: Scoring, target: float | None) -> Study:
    """The study by this rule, and by another value of its target.

    Raises:
        UserError: runs have no common metric, or stopped before they could reach the value.
    """
    study = replace(study, scoring=rule)
    try:
        return study if target is None else study.at_target(target)
    except ValueError as error:
        raise UserError(f"--target={target:g}: {error}") from None


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
