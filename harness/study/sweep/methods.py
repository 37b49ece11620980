"""Methods of a sweep: each has a name and fields that override the shared ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.study.sweep.fields import SHARED, Fields, Leaf, flatten
from harness.yaml_files.document import Document, Place, described
from harness.yaml_files.validation_messages import not_allowed


@dataclass(frozen=True)
class Method:
    """A method.

    Attributes:
        fields: shared, own and command-line values, merged; `kfac.*` only if it has a kfac section.
    """

    name: str
    place: Place
    fields: Fields
    has_kfac: bool


def read_methods(document: Document, overrides: Fields) -> list[Method]:
    """The methods in file order.

    Raises:
        SweepError: no methods, a name missing or given twice, an unknown field, or K-FAC settings that no
            method uses.
    """
    listed = document.content.get("methods")
    if not isinstance(listed, list) or not listed:
        raise document.error(
            ("methods",), f" must be a list such as [{{name: sgd}}], got {described(listed or None)}"
        )
    top = {key: value for key, value in document.content.items() if key in SHARED}
    shared = flatten(document, (), top, SHARED)
    methods: list[Method] = []
    for index, entry in enumerate(listed):
        method = _method(document, ("methods", index), entry, shared, overrides)
        for other in methods:
            if other.name == method.name:
                first = document.lines[other.place]
                raise document.error(
                    (*method.place, "name"), f"={method.name!r} is already used on line {first}"
                )
        methods.append(method)
    kfac = [leaf for path, leaf in {**shared, **overrides}.items() if path.startswith("kfac.")]
    if kfac and not any(method.has_kfac for method in methods):
        raise document.error(kfac[-1].place, " is used by no method; give one a section, `kfac: {}`")
    return methods


def named_method(document: Document, leaf: Leaf, methods: Sequence[Method]) -> Method:
    """The method that `leaf` names.

    Raises:
        SweepError: there is none.
    """
    for method in methods:
        if method.name == leaf.value:
            return method
    names = [method.name for method in methods]
    raise document.error(leaf.place, f"={leaf.value!r} is not a method{not_allowed(str(leaf.value), names)}")


def _method(document: Document, place: Place, entry: Any, shared: Fields, overrides: Fields) -> Method:
    if not isinstance(entry, dict):
        raise document.error(place, f" must be a mapping such as {{name: sgd}}, got {described(entry)}")
    name = entry.get("name")
    if not isinstance(name, str):
        raise document.error((*place, "name"), f" must be the method's name as text, got {described(name)}")
    settings = {key: value for key, value in entry.items() if key != "name"}
    own = flatten(document, place, settings, SHARED)
    has_kfac = any(key.partition(".")[0] == "kfac" for key in settings)
    merged = {
        path: leaf
        for path, leaf in {**shared, **own, **overrides}.items()
        if has_kfac or not path.startswith("kfac.")
    }
    return Method(name, place, {**merged, "method": Leaf(name, (*place, "name"))}, has_kfac)
