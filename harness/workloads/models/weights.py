"""Weights in files: a finished run's and Hugging Face's, and a BERT that starts from them."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from harness.errors import DataError
from harness.workloads.sources.files import import_extra

OWN_FILE = "model.pt"
"""In the folder of an attempt whose cell has `training.save_model`."""

_LONGEST_REASON = 800  # characters of a message: a BERT has hundreds of names
_HUGGING_FACE = ("model.safetensors", "pytorch_model.bin")


def save_weights(model: nn.Module, folder: Path) -> Path:
    """Write the parameters and persistent buffers by name, each once, complete or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    path, unfinished = folder / OWN_FILE, folder / f".{OWN_FILE}"
    names = {name for name, _ in model.named_parameters()} | {name for name, _ in model.named_buffers()}
    weights = {name: each.detach().cpu() for name, each in model.state_dict().items() if name in names}
    with unfinished.open("wb") as file:
        torch.save(weights, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    return path


def find_weights(named: str) -> Path:
    """The file that a path means: itself, or the one in a folder; of a run that of the newest attempt.

    Raises:
        DataError: there is none.
    """
    path = Path(os.path.expandvars(named)).expanduser()
    if path.is_file():
        return path
    attempts = sorted(path.glob("attempt-*"), key=lambda each: (len(each.name), each.name), reverse=True)
    places = [path / name for name in (*_HUGGING_FACE, OWN_FILE)] + [each / OWN_FILE for each in attempts]
    found = next((place for place in places if place.is_file()), None)
    if found is None:
        raise DataError(
            f"workload.options.start={named!r}: {path} is neither a file of weights nor a folder with "
            f"{', '.join(_HUGGING_FACE)} or {OWN_FILE}, which training.save_model leaves in a run's attempt"
        )
    return found


def read_weights(path: Path) -> Mapping[str, Tensor]:
    """Tensors by name, on the CPU; nothing that the file contains is executed.

    Raises:
        DataError: the file is damaged, or contains more than tensors.
        ModuleNotFoundError: it is a `.safetensors` and that library is not installed.
    """
    try:
        if path.suffix == ".safetensors":
            library = import_extra("safetensors.torch", f"reading {path.name}", "language")
            found = library.load_file(path)
        else:
            found = torch.load(path, map_location="cpu", weights_only=True)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # either library raises whatever the bytes lead it to
        reason = " ".join(str(error).split())
        if isinstance(error, pickle.UnpicklingError):
            reason = "it is damaged, or contains more than tensors"
        raise DataError(f"{path} cannot be read as weights: {reason[:200]}; get another copy") from None
    if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in found.values()):
        raise DataError(f"{path} must hold tensors by name, as a state_dict does")
    return found


_RENAMED = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
_COUNTERS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")  # 0, 1, 2, ...: no weights
_POSITIONS = "bert.embeddings.position_embeddings.weight"
_NEXT_SENTENCE = ("bert.pooler.", "cls.seq_relationship.")


def load_start(model: nn.Module, options: Mapping[str, Any]) -> None:
    """Start a BERT from the weights that the option `start` names.

    Names and shapes must be those of the model, as Hugging Face's BertForPreTraining has them, also with
    `gamma` and `beta` of the first conversions. Of weights that are tied the file may have one.

    Raises:
        DataError: the file is missing or damaged, or has other weights than the model.
    """
    path = find_weights(options["start"])
    weights = {_name_today(name): each for name, each in read_weights(path).items() if name not in _COUNTERS}
    tied: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(parameter, []).append(name)
    for names in tied.values():
        given = [weights[name] for name in names if name in weights]
        weights |= {name: given[0] for name in names if given and name not in weights}
    rows = len(model.get_parameter(_POSITIONS))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        reasons = [" ".join(str(error).split())[:_LONGEST_REASON], *_hints(weights, rows, options)]
        raise DataError(f"{path} does not fit the model: {'; '.join(reasons)}") from None
    state = model.state_dict()
    odd = [
        name
        for name, each in weights.items()
        if not (each.isfinite().all() and torch.equal(state[name], each.to(state[name].dtype)))
    ]
    if odd:
        raise DataError(
            f"{path} does not fit the model: not finite, or tied in the model and different in the file: "
            f"{', '.join(odd)[:_LONGEST_REASON]}"
        )


def _name_today(name: str) -> str:
    for old, new in _RENAMED.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def _hints(weights: Mapping[str, Tensor], wanted: int, options: Mapping[str, Any]) -> Iterator[str]:
    """Which option makes a common mismatch go away; the model has `wanted` positions."""
    has_heads = any(name.startswith(_NEXT_SENTENCE) for name in weights)
    if has_heads != options["next_sentence"]:
        yield f"set workload.options.next_sentence: {str(has_heads).lower()}"
    rows = len(weights[_POSITIONS]) if _POSITIONS in weights else wanted
    if rows > wanted:
        yield f"set workload.options.positions: {rows}, of which sequences use the first ones"
    elif rows < wanted:
        yield (
            f"its sequences had at most {rows} tokens: train the first phase with "
            f"workload.options.positions: {wanted}"
        )
