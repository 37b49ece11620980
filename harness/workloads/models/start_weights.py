"""Starts a BERT from weights in a file, whose names and shapes must be those of the model.

Names are those of Hugging Face's BertForPreTraining, with `gamma` and `beta` of the first conversions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import DataError
from harness.workloads.sources.weight_files import find_weights, read_weights

_MOST_NAMES = 8  # of one kind of mismatch in a message
_RENAMED = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
_COUNTERS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")  # 0, 1, 2, ...: no weights
_POSITIONS = "bert.embeddings.position_embeddings.weight"
_NEXT_SENTENCE = ("bert.pooler.", "cls.seq_relationship.")


@torch.no_grad()
def load_start(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Copy the weights that the option `start` names into a model.

    Raises:
        DataError: the file is missing or damaged, or has other weights than the model.
    """
    path = find_weights(options["start"])
    weights = {_name_today(name): each for name, each in read_weights(path).items() if name not in _COUNTERS}
    names: dict[nn.Parameter, list[str]] = {}  # tied weights have several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    wrong = [*_mismatches(weights, names), *_hints(weights, names, options)]
    if wrong:
        raise DataError(f"{path} does not fit the model: {'; '.join(wrong)}")
    for parameter, aliases in names.items():
        parameter.copy_(next(weights[name] for name in aliases if name in weights))


def _name_today(name: str) -> str:
    for old, new in _RENAMED.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _mismatches(weights: Mapping[str, Tensor], names: Mapping[nn.Parameter, Sequence[str]]) -> Iterator[str]:
    known = {name for aliases in names.values() for name in aliases}
    missing = [aliases[0] for aliases in names.values() if not weights.keys() & set(aliases)]
    pairs = [
        (name, weights[name], parameter)
        for parameter, aliases in names.items()
        for name in aliases
        if name in weights
    ]
    shapes = [
        f"{name} {list(got.shape)} for {list(wanted.shape)}"
        for name, got, wanted in pairs
        if got.shape != wanted.shape
    ]
    bad = [
        name for name, got, _ in pairs if not (got.is_floating_point() and bool(torch.isfinite(got).all()))
    ]
    yield from _listed("it lacks", missing)
    yield from _listed("the model lacks", [name for name in weights if name not in known])
    yield from _listed("other shapes:", shapes)
    yield from _listed("not finite floating-point numbers:", bad)
    yield from _listed("weights that are tied in the model differ in the file:", _untied(weights, names))


def _untied(weights: Mapping[str, Tensor], names: Mapping[nn.Parameter, Sequence[str]]) -> list[str]:
    found = []
    for aliases in names.values():
        first, *others = [name for name in aliases if name in weights] or [""]
        found += [f"{first} and {name}" for name in others if not torch.equal(weights[first], weights[name])]
    return found


def _hints(
    weights: Mapping[str, Tensor], names: Mapping[nn.Parameter, Sequence[str]], options: Mapping[str, Any]
) -> Iterator[str]:
    """Which option makes a common mismatch go away."""
    has_heads = any(name.startswith(_NEXT_SENTENCE) for name in weights)
    if has_heads != options["next_sentence"]:
        yield f"set workload.options.next_sentence: {str(has_heads).lower()}"
    rows = len(weights[_POSITIONS]) if _POSITIONS in weights else None
    wanted = next(len(parameter) for parameter, aliases in names.items() if _POSITIONS in aliases)
    if rows is not None and rows > wanted:
        yield f"set workload.options.positions: {rows}, of which sequences use the first ones"
    elif rows is not None and rows < wanted:
        yield (
            f"its sequences had at most {rows} tokens: train the first phase with "
            f"workload.options.positions: {wanted}"
        )


def _listed(kind: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        yield f"{kind} {', '.join(names[:_MOST_NAMES])}{more}"
