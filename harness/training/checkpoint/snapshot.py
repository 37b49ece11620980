"""The content of a checkpoint: what is the same on every rank, and what each rank has of its own."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from harness.training.checkpoint.loading import Loaded
from harness.training.training_state import TrainingState
from harness.training.world import World
from kfac_core.state import merge_shards
from kfac_core.timing import WindowTotals


def snapshot(state: TrainingState, device: torch.device) -> tuple[dict[str, Any], dict[str, Any]]:
    """(shared, own): plain data and tensors, which are not copied."""
    shared = {
        "parameters": {name: p.detach() for name, p in state.model.named_parameters()},
        "optimizer": state.optimizer.state_dict(),
    }
    own = {
        "buffers": dict(state.model.named_buffers()),  # differ by rank: running statistics of its batches
        "kfac": state.kfac.state_shard() if state.kfac is not None else None,
        "random": _random_states(device),
        "loss_sum": float(state.loss_sum),
        "loss_steps": state.loss_steps,
        "rate": state.learning_rate,
        "window_start": state.window_start,
        "window": asdict(state.window),
        "clocks": state.clocks.state(),
    }
    return shared, own


def restore(state: TrainingState, loaded: Loaded, world: World) -> None:
    """Restore a freshly built state from a checkpoint; a collective call.

    In a world of the same size the run continues bit for bit. In another one parameters, optimizer, K-FAC and
    clocks are restored; random generators start as in a fresh run, and an open window begins anew.
    """
    own = loaded.parts[world.rank % len(loaded.parts)]
    with torch.no_grad():
        for name, parameter in state.model.named_parameters():
            parameter.copy_(loaded.shared["parameters"][name])
        for name, buffer in state.model.named_buffers():
            buffer.copy_(own["buffers"][name])
    state.optimizer.load_state_dict(loaded.shared["optimizer"])
    state.step = loaded.step
    state.learning_rate = own["rate"]
    if loaded.same_world:
        _restore_rank(state, own, world.device)
    else:
        _merge_ranks(state, loaded.parts, world.rank)


def _restore_rank(state: TrainingState, own: Mapping[str, Any], device: torch.device) -> None:
    if state.kfac is not None:
        state.kfac.load_state_shard(own["kfac"])
    state.clocks.restore(own["clocks"])
    state.loss_sum.fill_(own["loss_sum"])
    state.loss_steps = own["loss_steps"]
    state.window_start = own["window_start"]
    state.window = WindowTotals(**own["window"])
    _set_random_states(own["random"], device)


def _merge_ranks(state: TrainingState, parts: Sequence[Mapping[str, Any]], rank: int) -> None:
    if state.kfac is not None:
        state.kfac.load_state_dict(merge_shards([part["kfac"] for part in parts]))
    names = parts[0]["clocks"]
    state.clocks.restore({name: max(part["clocks"][name] for part in parts) for name in names})
    if rank == 0:  # these are summed over ranks, so one rank can hold the total
        state.loss_sum.fill_(sum(part["loss_sum"] for part in parts))
        state.loss_steps = sum(part["loss_steps"] for part in parts)
    state.window_start = state.step


def _random_states(device: torch.device) -> dict[str, Any]:
    """States of Python's, NumPy's and torch's global generators, and of the device's."""
    name, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def _set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Set all generators to what `_random_states` returned."""
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, gauss = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
