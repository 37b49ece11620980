"""A trainer's state between two steps: what is the same on every rank, and what each rank has to itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from harness.training.checkpoint.randomness import random_states, set_random_states
from kfac_core.state import merge_shards
from kfac_core.timing.timer import WindowTotals

if TYPE_CHECKING:
    from harness.training.checkpoint.loading import Loaded
    from harness.training.train import Trainer


def state_of(trainer: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """(shared, own): plain data and tensors, which are not copied."""
    shared = {
        "parameters": {name: p.detach() for name, p in trainer._model.named_parameters()},
        "optimizer": trainer._optimizer.state_dict(),
    }
    clocks = trainer._clocks
    own = {
        "buffers": dict(trainer._model.named_buffers()),  # each rank's own: running statistics of its batches
        "kfac": trainer.kfac.state_shard() if trainer.kfac is not None else None,
        "random": random_states(trainer._world.device),
        "loss_sum": float(trainer._loss_sum),
        "loss_steps": trainer._loss_steps,
        "rate": trainer._rate,
        "window_start": trainer._window_start,
        "window": asdict(trainer._carried),
        "clocks": {
            "train_seconds": trainer._train_seconds,
            "eval_seconds": clocks.eval_seconds,
            "checkpoint_seconds": clocks.checkpoint_seconds,
            "earlier_wall_seconds": clocks.wall_seconds,
        },
    }
    return shared, own


def restore(trainer: Trainer, loaded: Loaded) -> None:
    """Bring a freshly built trainer to where the state was taken; every rank calls it.

    In a world of the same size it goes on bit for bit. In another one parameters, optimizer, K-FAC and clocks
    move; random generators start as in a fresh run, and a window that was open begins anew.
    """
    own = loaded.parts[trainer._world.rank % len(loaded.parts)]
    with torch.no_grad():
        for name, parameter in trainer._model.named_parameters():
            parameter.copy_(loaded.shared["parameters"][name])
        for name, buffer in trainer._model.named_buffers():
            buffer.copy_(own["buffers"][name])
    trainer._optimizer.load_state_dict(loaded.shared["optimizer"])
    trainer._step = loaded.step
    trainer._rate = own["rate"]
    if loaded.same_world:
        _go_on(trainer, own)
    else:
        _move(trainer, loaded.parts, loaded.step)


def _go_on(trainer: Trainer, own: Mapping[str, Any]) -> None:
    if trainer.kfac is not None:
        trainer.kfac.load_state_shard(own["kfac"])
    for name, value in own["clocks"].items():
        setattr(trainer._clocks, name, value)
    trainer._loss_sum.fill_(own["loss_sum"])
    trainer._loss_steps = own["loss_steps"]
    trainer._window_start = own["window_start"]
    trainer._carried = WindowTotals(**own["window"])
    set_random_states(own["random"], trainer._world.device)


def _move(trainer: Trainer, parts: Sequence[Mapping[str, Any]], step: int) -> None:
    if trainer.kfac is not None:
        trainer.kfac.load_state_dict(merge_shards([part["kfac"] for part in parts]))
    for name in parts[0]["clocks"]:
        setattr(trainer._clocks, name, max(part["clocks"][name] for part in parts))
    if trainer._world.rank == 0:  # sums over ranks: one of them may as well carry all
        trainer._loss_sum.fill_(sum(part["loss_sum"] for part in parts))
        trainer._loss_steps = sum(part["loss_steps"] for part in parts)
    trainer._window_start = step
