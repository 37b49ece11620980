"""Promise: a parameter that was frozen, tied, pruned or removed is named, and `refresh` takes it as it is."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from kfac_core import KFAC, ConfigError, KFACConfig

CONFIG = KFACConfig.sc20(factor_update_steps=1, inverse_update_steps=1, factor_decay=0.0, kl_clip=None)
Change = Callable[[nn.Module], object]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Conv1d(1, 2, 3)).double()


def pass_through(model: nn.Module, seed: int) -> None:
    model.zero_grad()
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    model[3](model[:3](x)[:, None]).square().mean().backward()


def begun(change: Change) -> tuple[nn.Module, KFAC]:
    model = net()
    kfac = KFAC(model, CONFIG)
    pass_through(model, 0)
    kfac.step()
    change(model)
    pass_through(model, 1)
    return model, kfac


REFUSED: dict[str, tuple[Change, str]] = {
    "a pruned bias": (lambda m: prune.l1_unstructured(m[0], "bias", 0.5), "bias of layer 0 .* computed now"),
    "a bias that is gone": (lambda m: setattr(m[2], "bias", None), "bias of layer 2 .* or gone"),
    "weight norm": (lambda m: parametrizations.weight_norm(m[2]), "weight of layer 2 .* computed now"),
    "spectral norm": (lambda m: parametrizations.spectral_norm(m[3]), "weight of layer 3 .* computed now"),
    "a tie": (lambda m: setattr(m[2], "weight", m[0].weight), "weight of layer 0 is tied"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_that_a_step_cannot_follow_is_refused_by_name_and_taken_on_request(name):
    change, message = REFUSED[name]
    model, kfac = begun(change)
    with pytest.raises(ConfigError, match=rf"{message}.*kfac.refresh\(\)"):
        kfac.step()
    kfac.refresh()
    pass_through(model, 2)
    kfac.step()


def test_a_bias_that_is_frozen_is_named_once_and_left_out_on_request():
    model, kfac = begun(lambda m: m[0].bias.requires_grad_(False))
    with pytest.warns(RuntimeWarning, match=r"the bias of 0 frozen since KFAC was made.*kfac.refresh\(\)"):
        kfac.step()
    pass_through(model, 2)
    kfac.step()
    kfac.refresh()
    pass_through(model, 3)
    kfac.step()
    same = net()
    same.load_state_dict(model.state_dict())
    same[0].bias.requires_grad_(False)
    fresh = KFAC(same, CONFIG)
    pass_through(same, 3)
    fresh.step()
    torch.testing.assert_close(model[0].weight.grad, same[0].weight.grad, rtol=1e-10, atol=0)


def test_a_weight_that_is_frozen_beside_its_bias_is_named():
    _, kfac = begun(lambda m: m[0].weight.requires_grad_(False))
    with pytest.warns(RuntimeWarning, match=r"the weight of 0 frozen since KFAC was made.*kfac.refresh\(\)"):
        kfac.step()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[0].requires_grad_(False),
        lambda m: m.requires_grad_(False).requires_grad_(True),
        lambda m: setattr(m[2], "weight", nn.Parameter(m[2].weight.detach().clone())),
    ],
)
def test_a_layer_frozen_for_a_while_or_a_new_parameter_of_the_same_shape_is_no_mistake(change):
    _, kfac = begun(change)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kfac.step()
