"""How messages name layers. A layer that is the whole model has an empty name."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN = 4
_ROOT = "the model"


def layer_text(name: str) -> str:
    """`layer 3`, or `the model`."""
    return f"layer {name}" if name else _ROOT


def listed_layers(names: Sequence[str]) -> str:
    """At most four names: `0, 2` or `0, 2, 4, 6 and others`."""
    return ", ".join(name or _ROOT for name in names[:_SHOWN]) + (" and others" if names[_SHOWN:] else "")
