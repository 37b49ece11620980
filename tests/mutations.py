"""Damage to a file of settings: one part replaced, dropped, doubled, nested, or the text itself broken."""

import copy
import json
import os
from random import Random
from typing import Any

COUNT = int(os.environ.get("KRONSCALE_MUTATIONS", "60"))
"""Damaged files of each kind that a test tries; `make fuzz` sets it to 5,000."""

JUNK: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 0.5, -0.5, 1e308, 1e-320, 10**7, 10**18, 2**63, 10**400,
    "", "x", "0.99", "nan", "a\nb", "\x00", "\u2028", "x" * 5_000,
    [], [[]], [None], {}, {"a": {"b": 1}}, [{"name": "sgd"}], [1, 1], [2, 1],
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
SIGNS = (b"[", b"{", b"]", b"- ", b"&a *a ", b"? ", b"!!python/name:os ", b"\t", b": ", b"9" * 5_000)
KEYS = ("x", "", "a.b", "a\nb", "method", "kfac", "optimizer.lr")


def mutated(content: Any, text: str, random: Random) -> bytes:
    """A damaged file.

    Args:
        content: what the file holds, of dicts and lists.
        text: the file's text.
        random: decides what is damaged, and how.
    """
    if random.random() < 0.25:
        return _broken(text.encode(), random)
    damaged = copy.deepcopy(content)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        _change(damaged, random)
    return json.dumps(damaged).encode()  # JSON is YAML, too


def _broken(text: bytes, random: Random) -> bytes:
    kind = random.randrange(5)
    place = random.randrange(len(text))
    if kind == 0:
        return text[:place]
    if kind == 1:
        return text[:place] + bytes([random.randrange(256)]) + text[place + 1 :]
    lines = text.splitlines(keepends=True)
    line = random.randrange(len(lines))
    if kind == 2:  # a line twice, or elsewhere
        lines.insert(random.randrange(len(lines) + 1), lines[line])
    elif kind == 3:
        del lines[line]
    else:
        sign = random.choice(SIGNS) * random.choice((1, 1, 40))
        cut = place % (len(lines[line]) or 1)
        lines[line] = lines[line][:cut] + sign + lines[line][cut:]
    return b"".join(lines)


def _change(content: Any, random: Random) -> None:
    """Change one part in place."""
    parent, key = random.choice(list(_parts(content)))
    value, kind = parent[key], random.randrange(7)
    if kind == 0:
        if isinstance(parent, dict):
            del parent[key]
        else:
            parent.pop(key)
    elif kind == 1 and isinstance(value, int | float) and not isinstance(value, bool):
        parent[key] = random.choice(
            (-value, value * 1000, value // 1000, str(value), float(min(value, 1e300)), value - 1)
        )
    elif kind == 2 and isinstance(value, list) and value:
        value.insert(random.randrange(len(value) + 1), copy.deepcopy(random.choice(value)))
    elif kind == 3 and isinstance(value, list):
        random.shuffle(value)
    elif kind == 4:
        for _ in range(random.choice((1, 2, 40, 100))):  # three in one another can still be copied
            value = [value] if random.random() < 0.5 else {"a": value}
        parent[key] = value
    elif kind == 5 and isinstance(parent, dict):
        parent[random.choice(KEYS)] = copy.deepcopy(value)
    else:
        parent[key] = copy.deepcopy(random.choice(JUNK))


def _parts(value: Any) -> Any:
    """Each part below `value`, as what holds it and its key."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in list(items):
        yield value, key
        yield from _parts(below)
