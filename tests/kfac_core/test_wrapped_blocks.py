"""Promise: a block that is compiled or checkpointed keeps the names of its layers, and so their state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from kfac_core import KFAC, KFACConfig
from kfac_core.state import merge_shards

Wrap = Callable[[nn.Module], nn.Module]


def compiled(block: nn.Module) -> nn.Module:
    wrapped: nn.Module = torch.compile(block, backend="eager")
    return wrapped


def both(block: nn.Module) -> nn.Module:
    return compiled(checkpoint_wrapper(block))


def plain(block: nn.Module) -> nn.Module:
    return block


WRAPS = [compiled, checkpoint_wrapper, both]


def model(wrap: Wrap) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2)]
    return nn.ModuleDict({"blocks": nn.Sequential(*map(wrap, blocks)), "head": nn.Linear(3, 2)})


def stepped(net: nn.Module, steps: int, state: Mapping[str, Any] | None = None, **options: Any) -> KFAC:
    config = KFACConfig.sc20(factor_update_steps=1, inverse_update_steps=1, kl_clip=None, **options)
    kfac = KFAC(net, config)
    if state is not None:
        kfac.load_state_dict(state)
    for step in range(steps):
        net.zero_grad()
        torch.manual_seed(step)
        net["head"](net["blocks"](torch.randn(6, 3))).square().mean().backward()
        kfac.step()
    return kfac


def with_names_of(state: Mapping[str, Any], wrapper: str) -> dict[str, Any]:
    """As releases before this one saved it."""

    def renamed(name: str) -> str:
        return name.replace("blocks.0.", f"blocks.0.{wrapper}.").replace("blocks.1.", f"blocks.1.{wrapper}.")

    new = dict(state)
    for kind in ("factors", "updates", "refused", "second_order"):
        if kind in new:
            new[kind] = {renamed(name): value for name, value in new[kind].items()}
    return new | {"solved": [renamed(name) for name in state["solved"]]}


@pytest.mark.parametrize("wrap", WRAPS)
def test_layers_have_the_names_that_they_have_without_wrappers(wrap):
    kfac = stepped(model(wrap), 1)
    assert [shape.name for shape in kfac.shapes] == ["blocks.0.0", "blocks.1.0", "head"]
    kfac.set_loss_terms(6, of={"blocks.1": 6})
    skipping = stepped(model(wrap), 1, skip=("blocks.0",))
    assert [shape.name for shape in skipping.shapes] == ["blocks.1.0", "head"]
    assert [each.name for each in skipping.summary().plain] == ["blocks.0.0"]
    assert "skip" in str(skipping)


@pytest.mark.parametrize("wrap", WRAPS)
def test_a_state_moves_between_wrapped_and_plain_blocks(wrap):
    saved = stepped(model(plain), 2).state_dict()
    there = stepped(model(wrap), 0, saved)
    assert saved["factors"].keys() == there.state_dict()["factors"].keys()
    back = stepped(model(plain), 0, there.state_dict())
    for name, factor in back.state_dict()["factors"].items():
        assert torch.equal(factor, saved["factors"][name])


@pytest.mark.parametrize("wrapper", ["_orig_mod", "_checkpoint_wrapped_module"])
def test_a_state_that_was_saved_with_the_wrappers_names_is_read(wrapper):
    saved = stepped(model(plain), 2)
    state, shard = saved.state_dict(), saved.state_shard()
    for old in (with_names_of(state, wrapper), merge_shards([with_names_of(shard, wrapper)])):
        kfac = stepped(model(compiled), 0, copy.deepcopy(old))
        for name, factor in kfac.state_dict()["factors"].items():
            assert torch.equal(factor, state["factors"][name])
    same = stepped(model(plain), 0)
    same.load_state_shard(with_names_of(shard, wrapper))
    assert same.steps == 2
