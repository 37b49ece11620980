"""`--where`: selects cells of a study.

    method=sgd                      seed in 0,1
    world_size>=2                   id=sgd-p1-s0-c8bbfec821
    kfac.damping<0.01               method=sgd and world_size>=2, seed=0

Clauses are joined by `and` or commas, and all must hold. If a cell does not have a field (`kfac.damping` of
SGD), only `!=` matches it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.cell import Cell
from harness.errors import FilterError
from harness.study.sweep import known_paths, value_of
from harness.yaml_files.validation_messages import did_you_mean

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CLAUSE = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(?:(==|!=|<=|>=|=|<|>)\s*|\s(in)\s+)(.*?)\s*\Z", re.DOTALL)
_WORDS = {"true": True, "false": False}


def select(cells: Sequence[Cell], expression: str | None) -> list[Cell]:
    """The cells that match; all cells if the expression is empty.

    Raises:
        FilterError: the expression is invalid, compares values of different types, or matches no cell; the
            message names the expression, the part that is wrong, and what is allowed.
    """
    text = expression or ""
    clauses = _clauses(text)
    selected = [cell for cell in cells if all(clause.holds(cell, text) for clause in clauses)]
    if cells and not selected:
        raise FilterError(f"--where {text!r}: none of the {len(cells)} cells matches")
    return selected


@dataclass(frozen=True)
class _Clause:
    field: str
    sign: str
    values: tuple[str, ...]

    def holds(self, cell: Cell, expression: str) -> bool:
        value = cell.id if self.field == "id" else value_of(cell, self.field)
        if value is None:
            return self.sign == "!="
        compare = _OPERATORS["=" if self.sign == "in" else self.sign]
        return any(compare(value, self._typed(value, text, expression)) for text in self.values)

    def _typed(self, value: Any, text: str, expression: str) -> Any:
        """`text` converted to the type of the cell's value."""
        if isinstance(value, bool) and text in _WORDS:
            return _WORDS[text]
        if isinstance(value, str) and self.sign in ("=", "==", "!=", "in"):
            return text
        if isinstance(value, int | float) and not isinstance(value, bool):
            try:
                return float(text)
            except ValueError:
                pass
        kind = {bool: "true or false", str: "text", tuple: "a list"}.get(type(value), "a number")
        raise FilterError(
            f"--where {expression!r}: {self.field}={value!r} is {kind} and cannot be compared by "
            f"{self.sign} with {text!r}"
        )


def _clauses(expression: str) -> list[_Clause]:
    if re.search(r"\s+or\s+", expression):
        raise FilterError(
            f"--where {expression!r}: `or` is not supported; list the values of one field, `field in a,b`"
        )
    parts = re.split(r"\s+and\s+", expression) if expression.strip() else []
    return [_read_clause(text, expression) for part in parts for text in _clause_texts(part)]


def _clause_texts(part: str) -> list[str]:
    """Split at commas; a piece without an operator belongs to the list of the `in` before it."""
    texts: list[str] = []
    for piece in part.split(","):
        before = _CLAUSE.match(texts[-1]) if texts else None
        if before and before[3] and not _CLAUSE.match(piece):
            texts[-1] += f",{piece}"
        else:
            texts.append(piece)
    return texts


def _read_clause(text: str, expression: str) -> _Clause:
    match = _CLAUSE.match(text)
    if match is None:
        raise FilterError(
            f"--where {expression!r}: cannot read {text.strip()!r}; write field=value, or one of "
            "!= < <= > >= , or `field in a,b`, joined by `and`"
        )
    field, sign, listed, value = match.groups()
    known = ["id", *known_paths()]
    if field not in known and not field.startswith("workload.options."):
        raise FilterError(
            f"--where {expression!r}: {field} is not a field{did_you_mean(field, known)}; "
            f"allowed: {', '.join(known)}"
        )
    values = tuple(item.strip() for item in value.split(",")) if listed else (value,)
    if not all(values):
        raise FilterError(f"--where {expression!r}: {text.strip()!r} has no value after the operator")
    return _Clause(field, sign or listed, values)
