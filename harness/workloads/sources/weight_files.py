"""Weights in files: a finished run's, and those of Hugging Face's models, read without its library."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from harness.errors import DataError
from harness.workloads.sources.extras import import_extra

OWN_FILE = "model.pt"
"""In the folder of an attempt whose cell has `training.save_model`."""

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
