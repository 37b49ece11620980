"""`include` adds cells to the grid, `exclude` drops every cell that matches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from harness.study.sweep.build import Draft
from harness.study.sweep.field_types import OPTION, typed, typed_option
from harness.study.sweep.fields import SHARED, Fields, Leaf, flatten, value_of
from harness.study.sweep.methods import Method, named_method
from harness.workloads import WORKLOADS
from harness.yaml_files.document import Document, Place, described

_SELECTABLE = ("method", "seed", *SHARED)


class Exclusions:
    """The entries of `exclude`; each must match at least one cell."""

    def __init__(self, document: Document, entries: Sequence[tuple[Place, Fields]]) -> None:
        self._document = document
        self._entries = entries
        self._used: set[Place] = set()

    def match(self, draft: Draft) -> bool:
        """Whether an entry drops `draft`; called before its sections are checked to fit together."""
        matching = [place for place, fields in self._entries if self._agrees(draft, fields)]
        self._used.update(matching)
        return bool(matching)

    def _agrees(self, draft: Draft, fields: Fields) -> bool:
        return all(self._has(draft, path, leaf) for path, leaf in fields.items())

    def _has(self, draft: Draft, path: str, leaf: Leaf) -> bool:
        if path.startswith(OPTION):
            defaults = WORKLOADS[draft.workload.name].options
            name = path.removeprefix(OPTION)
            if name not in defaults:  # of another workload of the sweep
                return False
            return bool(draft.workload.options[name] == typed_option(self._document, defaults[name], leaf))
        if path.startswith("kfac.") and draft.kfac is None:  # null is a value that a section may hold
            return False
        value = value_of(draft, path)
        return isinstance(value, bool) == isinstance(leaf.value, bool) and bool(value == leaf.value)

    def check_used(self) -> None:
        """Check that every entry dropped a cell.

        Raises:
            SweepError: one did not.
        """
        for place, fields in self._entries:
            if place not in self._used:
                wanted = ", ".join(f"{path}={leaf.value}" for path, leaf in fields.items())
                raise self._document.error(place, f" matches no cell: {wanted}")


def read_exclusions(document: Document, methods: Sequence[Method]) -> Exclusions:
    """The entries of `exclude`, with values of the fields' own types: `true` is no world size.

    Raises:
        SweepError: an entry has an unknown field or method, or a value that its field cannot hold.
    """
    entries = []
    for place, fields in _entries(document, "exclude"):
        if "method" in fields:
            named_method(document, fields["method"], methods)
        entries.append((place, {path: _typed(document, path, leaf) for path, leaf in fields.items()}))
    return Exclusions(document, entries)


def read_inclusions(
    document: Document, methods: Sequence[Method], overrides: Fields
) -> Iterator[tuple[Method, Place, Fields]]:
    """The entries of `include`, each with its method.

    Raises:
        SweepError: an entry has an unknown field, no method, K-FAC settings for a method without, or a field
            that the command line sets too: its value would have no effect on the entry's cells.
    """
    for place, fields in _entries(document, "include"):
        if "method" not in fields:
            names = ", ".join(method.name for method in methods)
            raise document.error(place, f" names no method; allowed: {names}")
        method = named_method(document, fields["method"], methods)
        for path in fields.keys() & overrides.keys():
            raise document.error(fields[path].place, f" is the entry's own; {path} cannot also be --set")
        kfac = [leaf for path, leaf in fields.items() if path.startswith("kfac.")]
        if kfac and not method.has_kfac:
            raise document.error(kfac[0].place, f" is set, but method {method.name} has no kfac section")
        yield method, place, fields


def _entries(document: Document, key: str) -> Iterator[tuple[Place, Fields]]:
    listed: Any = document.content.get(key, [])
    if not isinstance(listed, list):
        example = "such as [{method: sgd, world_size: 4}]"
        raise document.error((key,), f" must be a list of mappings, {example}, got {described(listed)}")
    for index, entry in enumerate(listed):
        fields = flatten(document, (key, index), entry, _SELECTABLE)
        if not fields:
            raise document.error((key, index), " is empty; name the fields to match")
        yield (key, index), fields


def _typed(document: Document, path: str, leaf: Leaf) -> Leaf:
    # An option's type is known once the workload is, see `Exclusions`.
    return leaf if path.startswith(OPTION) else replace(leaf, value=typed(document, path, leaf))
