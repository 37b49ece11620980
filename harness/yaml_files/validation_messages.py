"""Turns pydantic's errors into the end of a one-line error message."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

_PHRASES = {
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text in quotes",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    "dataclass_type": "must be a mapping",
    "greater_than_equal": "must be >= {ge}",
    "greater_than": "must be > {gt}",
    "less_than_equal": "must be <= {le}",
    "less_than": "must be < {lt}",
    "string_pattern_mismatch": "must be a name of up to 64 letters, digits, '_', '.' and '-', "
    "starting with a letter or a digit",
}


def explain(error: ValidationError) -> tuple[tuple[str | int, ...], str]:
    """The first error that pydantic found.

    Returns:
        The field's path inside what was validated, and the rest of the sentence: ` must be > 0, got -1`.
    """
    first, *others = error.errors(include_url=False)
    found = [first, *others]
    given = _given(first, found)
    if isinstance(given, dict):  # a mapping was meant as a schedule, not as a number
        kind = "Curve" if "shape" in given else "Milestones"
        scheduled = [other for other in found if kind in other["loc"]]
        if scheduled:
            return _inside_schedule(scheduled[0], kind)
    if first["loc"][:1] == ("schedule",):
        return _inside_schedule(first, "schedule", after=1)
    return _explain(first)


def did_you_mean(got: str, allowed: Iterable[str]) -> str:
    """`; did you mean x?` if a name is similar, else the empty string."""
    names = list(allowed)
    longer = [name for name in names if len(got) > 2 and name.startswith(f"{got}_")]
    close = longer or difflib.get_close_matches(got, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def not_allowed(got: str, allowed: Iterable[str]) -> str:
    """`; allowed: a, b; did you mean a?`."""
    names = list(allowed)
    return f"; allowed: {', '.join(names)}{did_you_mean(got, names)}"


def field_and_rest(sentence: str) -> tuple[str, str]:
    """Split `damping=0 is ...` or `damping must ...` after the field; empty if there is none."""
    named = re.match(r"([a-z]\w*)((?:=| must | pattern ).*)", sentence, re.DOTALL)
    return (named[1], named[2]) if named else ("", sentence)


def _given(first: ErrorDetails, found: Iterable[ErrorDetails]) -> object:
    """What was written where a schedule may stand; None elsewhere."""
    return first["input"] if any({"Milestones", "Curve"} & set(error["loc"]) for error in found) else None


def _inside_schedule(error: ErrorDetails, tag: str, after: int = 0) -> tuple[tuple[str | int, ...], str]:
    """The field that has a schedule, and a sentence that begins with the field of the schedule."""
    place, sentence = _explain(error)
    at = place.index(tag)
    return place[: at + after], "".join(f".{field}" for field in place[at + 1 :]) + sentence


def _explain(first: ErrorDetails) -> tuple[tuple[str | int, ...], str]:
    kind, place, context = first["type"], first["loc"], first.get("ctx", {})
    if kind == "missing":
        return place, " is missing"
    if kind == "value_error":
        field, sentence = field_and_rest(str(context["error"]))
        return ((*place, field), sentence) if field else (place, f" {sentence}")
    value = first["input"]
    if kind == "unexpected_keyword_argument":
        return place, " is not a known key"
    if kind == "literal_error":
        listed = context["expected"].replace("'", "").replace(" or ", ", ")
        return place, f"={value!r} is not one of {listed}{did_you_mean(str(value), listed.split(', '))}"
    if kind in _PHRASES:
        return place, f" {_PHRASES[kind].format_map(context)}, got {value!r}"
    return place, f"={value!r} is not allowed: {first['msg']}"
