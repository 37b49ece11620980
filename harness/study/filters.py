"""`--where`: selects cells of a study.

    method=sgd                      seed in 0,1
    world_size>=2                   id=sgd-p1-s0-c8bbfec821
    kfac.damping<0.01               method=sgd and world_size>=2, seed=0

Clauses are joined by `and` or commas, and all must hold; so must all expressions if `--where` is repeated.
A value is compared as the field's own type. `=`, `!=` and `in` take only values that some cell of the study
has, because a misspelt `method!=sdg` would select everything. A cell without the field (`kfac.damping` of
SGD) matches `field=null` and every `!=` with a value.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.cell import Cell
from harness.errors import FilterError
from harness.study.sweep import OPTION, known_paths, scalar_types, value_of
from harness.yaml_files.validation_messages import did_you_mean

_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "in": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_ORDERED = ("<", "<=", ">", ">=")
_CLAUSE = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(?:(==|!=|<=|>=|=|<|>)\s*|\s(in)\s+)(.*?)\s*\Z", re.DOTALL)
_WORDS = {"true": True, "false": False}
_WHOLE = re.compile(r"[-+]?[0-9]+\Z")
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_MOST_SHOWN = 12  # values in an error message


def select(cells: Sequence[Cell], *expressions: str) -> list[Cell]:
    """The cells that match all expressions; all cells if there is none.

    Raises:
        FilterError: an expression is empty or invalid, has a value of another type than its field's or one
            that no cell has, or all together match no cell; the message names the expression, the part that
            is wrong, and what is allowed.
    """
    selected = list(cells)
    for expression in expressions:
        for clause in _clauses(expression):
            holds = _condition(clause, cells, expression)
            selected = [cell for cell in selected if holds(cell)]
    if cells and not selected:
        given = " ".join(f"--where {expression!r}" for expression in expressions)
        raise FilterError(f"{given}: none of the {len(cells)} cells matches")
    return selected


@dataclass(frozen=True)
class _Clause:
    field: str
    sign: str
    values: tuple[str, ...]

    def error(self, expression: str, sentence: str) -> FilterError:
        return FilterError(f"--where {expression!r}: {self.field} {sentence}")


def _condition(clause: _Clause, cells: Sequence[Cell], expression: str) -> Callable[[Cell], bool]:
    if clause.field == "id":
        return _id_condition(clause, cells, expression)
    types = _types(clause, cells, expression)
    wanted = [_typed(clause, text, types, expression) for text in clause.values]
    if clause.sign in _ORDERED:
        _refuse_unordered(clause, cells, types, expression)
    else:
        known = {value_of(cell, clause.field) for cell in cells}
        for text, value in zip(clause.values, wanted, strict=True):
            if cells and value not in known:
                raise _unknown(clause, text, known, len(cells), expression)
    compare = _OPERATORS[clause.sign]

    def holds(cell: Cell) -> bool:
        value = value_of(cell, clause.field)
        if clause.sign in _ORDERED and value is None:
            return False
        return any(compare(value, one) for one in wanted)

    return holds


def _id_condition(clause: _Clause, cells: Sequence[Cell], expression: str) -> Callable[[Cell], bool]:
    """Cells by id or by `sweep/id`, as errors and commands print it."""
    if clause.sign in _ORDERED:
        raise clause.error(expression, f"is text and cannot be compared by {clause.sign}")
    ids = {cell.id for cell in cells}
    full = {f"{cell.sweep}/{cell.id}" for cell in cells}
    for text in clause.values:
        if cells and text not in ids | full:
            raise _unknown(clause, text, ids, len(cells), expression)
    listed = set(clause.values)
    wanted = clause.sign != "!="
    return lambda cell: (not listed.isdisjoint((cell.id, f"{cell.sweep}/{cell.id}"))) == wanted


def _types(clause: _Clause, cells: Sequence[Cell], expression: str) -> set[type]:
    workloads = {cell.workload.name for cell in cells}
    types = scalar_types(clause.field, workloads)
    if not types and clause.field.startswith(OPTION) and cells:
        options = {option for cell in cells for option in cell.workload.options}
        name = clause.field.removeprefix(OPTION)
        allowed = f"allowed: {', '.join(sorted(options)) or 'none'}"
        raise clause.error(
            expression,
            f"is not an option of {', '.join(sorted(workloads))}; {allowed}{did_you_mean(name, options)}",
        )
    if not types - {type(None)} and cells:
        raise clause.error(expression, "is a list or a mapping, which --where cannot compare")
    missing = any(value_of(cell, clause.field) is None for cell in cells)
    return types | {type(None)} if missing else types


def _typed(clause: _Clause, text: str, types: set[type], expression: str) -> Any:
    """`text` as a value of one of `types`."""
    if text == "null" and type(None) in types and clause.sign not in _ORDERED:
        return None
    if bool in types and text in _WORDS and clause.sign not in _ORDERED:
        return _WORDS[text]
    if float in types and _NUMBER.match(text):
        return float(text)
    if int in types and _WHOLE.match(text):
        return int(text)
    if str in types and clause.sign not in _ORDERED:
        return text
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    kinds = " or ".join(name for kind, name in names.items() if kind in types)
    raise clause.error(expression, f"is {kinds} and cannot be compared by {clause.sign} with {text!r}")


def _refuse_unordered(clause: _Clause, cells: Sequence[Cell], types: set[type], expression: str) -> None:
    """A schedule is neither smaller nor larger than a number."""
    for cell in cells:
        value = value_of(cell, clause.field)
        if value is not None and not isinstance(value, tuple(types)):
            raise clause.error(
                expression, f"is a schedule in cell {cell.id} and cannot be compared by {clause.sign}"
            )


def _unknown(clause: _Clause, text: str, known: set[Any], count: int, expression: str) -> FilterError:
    values = sorted(("null" if value is None else _shown(value) for value in known), key=_by_size)
    more = f" and {len(values) - _MOST_SHOWN} more" if len(values) > _MOST_SHOWN else ""
    return FilterError(
        f"--where {expression!r}: none of the {count} cells has {clause.field}={text}; "
        f"their values: {', '.join(values[:_MOST_SHOWN])}{more}{did_you_mean(text, values)}"
    )


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _by_size(text: str) -> tuple[float, str]:
    return (float(text) if _NUMBER.match(text) else float("inf"), text)


def _clauses(expression: str) -> list[_Clause]:
    if not expression.strip():
        raise FilterError(
            f"--where {expression!r}: is empty, which would select every cell; leave it out for that"
        )
    if re.search(r"\s+or\s+", expression):
        raise FilterError(
            f"--where {expression!r}: `or` is not supported; list the values of one field, `field in a,b`"
        )
    parts = re.split(r"\s+and\s+", expression)
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
    if field not in known and not field.startswith(OPTION):
        raise FilterError(
            f"--where {expression!r}: {field} is not a field{did_you_mean(field, known)}; "
            f"allowed: {', '.join(known)}"
        )
    values = tuple(item.strip() for item in value.split(",")) if listed else (value,)
    if not all(values):
        raise FilterError(f"--where {expression!r}: {text.strip()!r} has no value after the operator")
    return _Clause(field, sign or listed, values)
