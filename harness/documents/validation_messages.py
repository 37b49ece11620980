"""Turns what pydantic says about a value into the end of a one-line message."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

_PHRASES = {
    "int_type": "is not a whole number",
    "int_from_float": "is not a whole number",
    "float_type": "is not a number",
    "finite_number": "is not a finite number",
    "string_type": "is not text; quote it if it should be",
    "bool_type": "is neither true nor false",
    "tuple_type": "is not a list",
    "dict_type": "is not a mapping",
    "model_type": "is not a mapping",
    "dataclass_type": "is not a mapping",
    "unexpected_keyword_argument": "is no key of it",
    "greater_than_equal": "is not allowed; use a value >= {ge}",
    "greater_than": "is not allowed; use a value > {gt}",
    "less_than_equal": "is not allowed; use a value <= {le}",
    "less_than": "is not allowed; use a value < {lt}",
    "literal_error": "is not one of {expected}",
    "string_pattern_mismatch": "is no name; use up to 64 letters, digits, '_', '.' and '-', "
    "starting with a letter or a digit",
}


def explain(error: ValidationError) -> tuple[tuple[str | int, ...], str]:
    """The first thing that pydantic refused.

    Returns:
        The field's path inside what was validated, and the rest of the sentence: `='x' is not a number`. A
        sentence of our own that starts with a field's name gives that name as the path.
    """
    first, *others = error.errors(include_url=False)
    scheduled = [other for other in (first, *others) if "Milestones" in other["loc"]]
    if scheduled and isinstance(first["input"], dict):  # a mapping was meant as a schedule, not as a number
        return _inside_schedule(scheduled[0])
    return _explain(first)


def did_you_mean(got: str, allowed: Iterable[str]) -> str:
    """`; did you mean x?` for a near miss, the empty string otherwise."""
    names = list(allowed)
    longer = [name for name in names if len(got) > 2 and name.startswith(f"{got}_")]
    close = longer or difflib.get_close_matches(got, names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def not_allowed(got: str, allowed: Iterable[str]) -> str:
    """`; allowed: a, b; did you mean a?`."""
    names = list(allowed)
    return f"; allowed: {', '.join(names)}{did_you_mean(got, names)}"


def _inside_schedule(error: ErrorDetails) -> tuple[tuple[str | int, ...], str]:
    """The field that is scheduled, and a sentence that begins with the field of the schedule."""
    place, sentence = _explain(error)
    tag = place.index("Milestones")
    return place[:tag], "".join(f".{field}" for field in place[tag + 1 :]) + sentence


def _explain(first: ErrorDetails) -> tuple[tuple[str | int, ...], str]:
    kind, place, context = first["type"], first["loc"], first.get("ctx", {})
    if kind == "missing":
        return place, " is missing"
    if kind == "value_error":
        return _own_sentence(place, str(context["error"]))
    phrase = _PHRASES.get(kind, f"is not allowed: {first['msg']}").format_map(context)
    value = first["input"]
    if kind == "literal_error":
        phrase = phrase.replace("'", "").replace(" or ", ", ")
        phrase += did_you_mean(str(value), re.findall(r"'([^']*)'", context["expected"]))
    return place, f"={value!r} {phrase}"


def _own_sentence(place: tuple[str | int, ...], sentence: str) -> tuple[tuple[str | int, ...], str]:
    named = re.match(r"([a-z]\w*)((?:=| pattern ).*)", sentence, re.DOTALL)
    if named:
        return (*place, named[1]), named[2]
    return place, f" {sentence}"
