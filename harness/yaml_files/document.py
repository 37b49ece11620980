"""Strict reader of YAML files that remembers the line of every value.

YAML 1.2 core schema: `1e-3` is a number, `no` and `on` are text, `012` is twelve. Errors: a key twice in a
mapping, a key that is not text, tags, a second document, aliases that contain themselves, and what is larger
than anyone writes: bytes, values, levels, digits.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from harness.errors import UserError

Place = tuple[str | int, ...]
"""Path from the top of a document to a value: `("methods", 2, "kfac", "strategy")`."""

_Loader: type[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C parser is much faster
_INT = re.compile(r"[-+]?[0-9]+(_[0-9]+)*\Z")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?\Z")
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}
_MOST_BYTES = 256 << 10  # thousands of single cells; a grid or seeds say the same in a line
_MOST_VALUES = 100_000  # aliases of aliases can expand to more values than fit into memory
_MOST_LEVELS = 32  # the deepest setting has six; the C parser of more than some 10,000 ends the process
_TOO_DEEP = f"nested too deep; at most {_MOST_LEVELS} levels are allowed"
_MOST_DIGITS = 18  # of a whole number, which fits in 64 bits then
_MOST_MESSAGE = 1_000
_WORLD_SIZES: tuple[Place, ...] = (("timeout_minutes",),)  # their keys are whole numbers, kept as text
_MOST_SHOWN = 200  # characters of a value or a key in an error message


@dataclass(frozen=True)
class Document:
    """Content of a file as plain values.

    Attributes:
        path: the file, as the user named it.
        content: dicts, lists, text, numbers, booleans, None.
        lines: line of every value, counted from 1.
        error_class: class of the errors about this file.
    """

    path: Path
    content: Any
    lines: Mapping[Place, int]
    error_class: type[UserError] = UserError

    def error(self, place: Place, text: str) -> UserError:
        """An error message that names the file, the line of `place` (or of what encloses it) and `place`.

        Args:
            place: what is wrong; empty for the whole file.
            text: the rest of the sentence, beginning with a space or with `=` and the value.
        """
        # The message has one line even if a key or a value has several.
        text, name = _one_line(text), _shortened(_one_line(dotted(place)))
        if place and str(place[0]).startswith("--"):  # from the command line, so without a line number
            return self.error_class(f"{self.path}: {name}{text}")
        known = place
        while known and known not in self.lines:
            known = known[:-1]
        return self.error_class(f"{self.path}:{self.lines.get(known, 1)}: {name}{text}".rstrip())


def read_document(path: Path, error_class: type[UserError]) -> Document:
    """Read a file whose top level is a mapping.

    Raises:
        UserError: of the class `error_class`; the file is missing, empty, unreadable or not strict YAML.
    """
    values = _Values(path, error_class)
    content = values.read(_read_text(path, error_class))
    if content is None:
        raise error_class(f"{path}:1: the file is empty")
    if not isinstance(content, dict):
        raise error_class(f"{path}:1: the top level is {described(content)}, not a mapping of keys to values")
    return Document(path, content, values.lines, error_class)


def read_value(text: str, source: str, error_class: type[UserError]) -> Any:
    """Read a value from the command line by the same rules; `source` names it in errors."""
    return _Values(Path(source), error_class).read(text)


def dotted(place: Place) -> str:
    """A place as text: `methods[2].kfac.strategy`."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in place]
    return "".join(parts).removeprefix(".")


def value_at(content: Any, place: Place) -> Any:
    """The value at a place that exists."""
    for part in place:
        content = content[part]
    return content


def described(value: Any) -> str:
    """A value as error messages show it; mappings and lists without their content."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else _shortened(repr(value))


def _one_line(text: str) -> str:
    """The text without line ends, of a long one its beginning and its end."""
    text = " ".join(text.splitlines())
    return text if len(text) <= _MOST_MESSAGE else f"{text[:400]} ... {text[-400:]}"


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def _read_text(path: Path, error_class: type[UserError]) -> str:
    """The text of a regular file of bounded size; a pipe or a device could block, or never end."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # opening a pipe would block
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise error_class(f"{path}: must be a regular file, got a folder, a pipe or a device")
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise error_class(f"{path}: has more than {_MOST_BYTES >> 10} KiB, the most that is allowed")
        return content.decode()
    except FileNotFoundError:
        raise error_class(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        raise error_class(f"{path}: cannot be read as text: {error}") from None
    except (OSError, ValueError) as error:  # ValueError: NUL in the path, and the errors above
        if isinstance(error, UserError):
            raise
        raise error_class(f"{path}: cannot be read: {error}") from None


class _Values:
    """Converts YAML nodes to values and remembers their lines."""

    def __init__(self, path: Path, error_class: type[UserError]) -> None:
        self.lines: dict[Place, int] = {}
        self._path = path
        self._error_class = error_class
        self._open: list[yaml.Node] = []

    def read(self, text: str) -> Any:
        try:
            self._check_levels(text)
            node = _Loader(text).get_single_node()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            text = f"not readable as YAML: {error.problem}"
            raise self._error(mark.line + 1 if mark else None, text) from None
        except yaml.YAMLError as error:
            raise self._error(None, f"not readable as YAML: {' '.join(str(error).split())}") from None
        return None if node is None else self._value(node, ())

    def _check_levels(self, text: str) -> None:
        """Refuse deep nesting before it is composed, which recurses, in C without a limit."""
        level, loader = 0, _Loader(text)
        while loader.check_event():
            event = loader.get_event()
            if isinstance(event, yaml.CollectionStartEvent):
                level += 1
                if level > _MOST_LEVELS:
                    mark = event.start_mark
                    raise self._error(mark.line + 1 if mark else None, _TOO_DEEP)
            elif isinstance(event, yaml.CollectionEndEvent):
                level -= 1

    def _value(self, node: yaml.Node, place: Place) -> Any:
        line = node.start_mark.line + 1
        self.lines[place] = line
        if node in self._open:
            raise self._error(line, f"{dotted(place)} contains itself through an alias")
        if len(self._open) > _MOST_LEVELS:  # deeper than the text, through aliases
            raise self._error(line, _TOO_DEEP)
        if len(self.lines) > _MOST_VALUES:
            raise self._error(line, f"has more than {_MOST_VALUES:,} values, the most that is allowed")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, place)
        self._open.append(node)
        value: Any
        if isinstance(node, yaml.MappingNode):
            value = self._mapping(node, place)
        else:
            value = [self._value(item, (*place, index)) for index, item in enumerate(node.value)]
        self._open.pop()
        return value

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = self._scalar(key_node, place) if isinstance(key_node, yaml.ScalarNode) else None
            if place in _WORLD_SIZES and type(key) is int:
                key = str(key)
            if not isinstance(key, str):
                inside = f" in {dotted(place)}" if place else ""
                plain = isinstance(key_node, yaml.ScalarNode)
                name = _shortened(repr(key_node.value)) if plain else "(a list)"
                raise self._error(line, f"key {name}{inside} must be text")
            if key in values:
                first = self.lines[*place, key]
                raise self._error(line, f"{dotted((*place, key))} is given twice, first on line {first}")
            values[key] = self._value(value_node, (*place, key))
            self.lines[*place, key] = line
        return values

    def _scalar(self, node: yaml.ScalarNode, place: Place) -> Any:
        text: str = node.value
        if node.tag == "!" or not node.tag.startswith("tag:yaml.org,2002:") or "python" in node.tag:
            text = f"{dotted(place)} has the tag {node.tag}; tags are not allowed"
            raise self._error(node.start_mark.line + 1, text)
        if node.style:  # quoted or a block: always text
            return text
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if _INT.match(text):
            digits = text.lstrip("+-").replace("_", "").lstrip("0") or "0"
            if len(digits) > _MOST_DIGITS:
                wrong = f"{dotted(place)}={_shortened(text)} has too many digits; at most {_MOST_DIGITS}"
                raise self._error(node.start_mark.line + 1, f"{wrong} are allowed")
            return -int(digits) if text[0] == "-" else int(digits)
        return float(text) if _FLOAT.match(text) else text

    def _error(self, line: int | None, text: str) -> UserError:
        text = _one_line(text)
        return self._error_class(f"{self._path}{'' if line is None else f':{line}'}: {text}")
