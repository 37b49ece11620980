"""Words pydantic's errors: where in the file, what was got, what is allowed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import get_args

from pydantic import BaseModel, ValidationError

from harness.yaml_files.document import described

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
    "too_short": "must have {min_length} or more entries",
    "greater_than_equal": "must be >= {ge}",
    "greater_than": "must be > {gt}",
    "less_than_equal": "must be <= {le}",
    "less_than": "must be < {lt}",
    "string_pattern_mismatch": "must be a name of up to 64 letters, digits, '_', '.' and '-', "
    "starting with a letter or a digit",
}
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_BRANCHES = ("int", "float", "str", "Milestones", "Curve")
"""Names that pydantic adds to a path for each type that a field may have, of those with several."""


def explain(
    error: ValidationError, model: type[BaseModel] | None = None
) -> tuple[tuple[str | int, ...], str]:
    """The first error that pydantic found.

    Args:
        error: what pydantic raised.
        model: what was validated, for the keys that are allowed in the place of an unknown one.

    Returns:
        The field's path inside what was validated, and the rest of the sentence: ` must be > 0, got -1`.
    """
    first, *others = error.errors(include_url=False)
    if first["type"] == "missing":  # a misspelt key is more likely than a forgotten one
        first = next((other for other in others if other["type"] in _UNKNOWN), first)
    elif isinstance(first["input"], dict):  # a mapping was meant as a schedule, not as a number
        branch = "Curve" if "shape" in first["input"] else "Milestones"
        first = next((other for other in others if branch in other["loc"]), first)
    kind, value, context = first["type"], first["input"], first.get("ctx", {})
    place = tuple(part for part in first["loc"] if part not in _BRANCHES)
    if kind == "missing":
        return place, " is missing"
    if kind == "value_error":
        path, sentence = field_and_rest(str(context["error"]))
        return (*place, *path), sentence
    if kind in _UNKNOWN:
        allowed = not_allowed(str(place[-1]), _keys(model, place[:-1])) if model else ""
        return place, f" is not a known key{allowed}"
    if kind == "literal_error":
        listed = context["expected"].replace("'", "").replace(" or ", ", ")
        return place, f"={value!r} is not one of {listed}{did_you_mean(str(value), listed.split(', '))}"
    if kind in _PHRASES:
        got = described(value) if isinstance(value, dict) else repr(value)
        return place, f" {_PHRASES[kind].format_map(context)}, got {got}"
    return place, f"={value!r} is not allowed: {first['msg']}"


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


def field_and_rest(sentence: str) -> tuple[list[str | int], str]:
    """The path at the beginning of a validator's sentence, `damping=0 is` or `at.0 must`, and the rest.

    A validator knows its field, but not where in a file the field is written.
    """
    for sign in ("=", " must ", " pattern "):
        path, found, rest = sentence.partition(sign)
        if found and path.replace(".", "_").isidentifier():
            return [int(part) if part.isdecimal() else part for part in path.split(".")], found + rest
    return [], f" {sentence}"


def _keys(model: type[BaseModel], place: tuple[str | int, ...]) -> list[str]:
    """The fields of the model at a path inside of `model`."""
    for part in place:
        if isinstance(part, str):
            annotation = model.model_fields[part].annotation
            (model,) = (
                inner
                for inner in (annotation, *get_args(annotation))
                if isinstance(inner, type) and issubclass(inner, BaseModel)
            )
    return list(model.model_fields)
