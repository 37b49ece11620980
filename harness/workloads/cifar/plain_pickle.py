"""Pickles from outside, read without running what they say: numbers, text, containers and integer arrays.

A pickle may name any callable and have it called. CIFAR is published as pickles, so whoever hands over a copy
could hand over code; here every name but those that an array of whole numbers is made of is refused.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO

import numpy as np

from harness.errors import DataError

_WHOLE_NUMBERS = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")


class RefusedNameError(pickle.UnpicklingError):
    """The pickle asks for something that is no plain data."""


def read_plain(path: Path) -> Any:
    """What the pickle at `path` holds, text of Python 2 as bytes.

    Raises:
        DataError: it is cut short, damaged, or holds more than plain data.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        try:
            return _PlainUnpickler(file).load()
        except RefusedNameError as error:
            raise DataError(
                f"{path}: asks for {error} while it is read, which was not run; a batch file holds arrays, "
                f"lists and text alone: get another copy"
            ) from None
        # A damaged stream of opcodes can fail in any of these ways.
        except (
            pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError,
            MemoryError, OverflowError, UnicodeDecodeError,
        ) as error:  # fmt: skip
            size = path.stat().st_size
            detail = " ".join(str(error).split()) or type(error).__name__
            raise DataError(
                f"{path}: cut short or damaged after {size} bytes ({detail}); copy or download it again"
            ) from None


class _PlainUnpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file, encoding="bytes")

    def find_class(self, module: str, name: str) -> Any:
        found = _NAMES.get((module, name))
        if found is None:
            raise RefusedNameError(f"{module}.{name}")
        return found


def _dtype(name: bytes | str, *_flags: object) -> np.dtype[Any]:
    text = name.decode("ascii") if isinstance(name, bytes) else name
    if text not in _WHOLE_NUMBERS:
        raise RefusedNameError(f"an array of {text!r}")
    return np.dtype(text)


class _Array:
    """Stands for the class of arrays: a name to hand on, with nothing to call."""


def _array(_kind: object, _shape: object, _code: object) -> np.ndarray[Any, Any]:
    """NumPy's own first step of an array, without its choice of class: the state that follows fills it."""
    return np.ndarray((0,), np.int8)


def _from_buffer(
    buffer: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any
) -> np.ndarray[Any, Any]:
    return np.frombuffer(buffer, dtype=dtype).reshape(shape, order=order)


def _latin(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes for Python 2."""
    if encoding != "latin1":
        raise RefusedNameError(f"text as {encoding!r}")
    return text.encode("latin1")


_NAMES: Mapping[tuple[str, str], Any] = MappingProxyType(
    {
        ("numpy", "dtype"): _dtype,
        ("numpy", "ndarray"): _Array,
        ("_codecs", "encode"): _latin,
        **{(f"numpy.{core}.multiarray", "_reconstruct"): _array for core in ("core", "_core")},
        **{(f"numpy.{core}.numeric", "_frombuffer"): _from_buffer for core in ("core", "_core")},
    }
)
"""What stands for each name: NumPy 1's and NumPy 2's own."""
