"""Promise: on architectures that nobody here wrote K-FAC takes the share stated here, and says nothing false.

The shares rise as kinds of layers are added; what stays plain is named in `print(kfac)`.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch

from kfac_core import KFAC, KFACConfig
from tests.kfac_core.architectures import ARCHITECTURES, made

SHARES = {
    "gpt2": 0.989, "bert": 0.979, "albert": 0.977, "t5": 0.944, "llama": 0.994, "llama, tied": 0.993,
    "qwen2": 0.994, "mixtral": 0.199, "mamba": 0.958, "vit": 0.954, "convnext": 0.973, "swin": 0.931,
    "wav2vec2": 0.831, "resnet": 0.982, "u-net": 0.990, "lstm": 0.174, "transformer encoder": 0.988,
    "low-rank adapters": 1.0, "mixer": 0.957, "mlp": 1.0, "weight norm": 0.130,
}  # fmt: skip
UNTAKEN_CALLS = {"mamba": "no statistics of backbone.layers.0.mixer.conv1d"}
"""Layers whose weights their model uses without calling them: K-FAC says so."""

pytestmark = pytest.mark.filterwarnings("default:Converting a tensor with requires_grad:UserWarning")


def test_there_are_at_least_twenty():
    assert set(SHARES) == set(ARCHITECTURES)
    assert len(SHARES) >= 20


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="comes with the extra `language`"
)
@pytest.mark.parametrize("name", SHARES)
def test_the_share_taken_is_known_and_steps_lower_the_loss(name, logged, recwarn):
    model, architecture = made(name), ARCHITECTURES[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    config = KFACConfig(kl_clip=0.01, damping=0.01, factor_update_steps=1, inverse_update_steps=2)
    kfac = KFAC(model, config, lr=optimizer)
    share = kfac.summary().share
    assert share == pytest.approx(SHARES[name], abs=0.0006)
    assert ("trained parameters" in logged.text) == (share < 0.8)
    first, *_ = batches = architecture.batches()
    with torch.no_grad():
        before = float(architecture.loss(model, first))
    for batch in (first, *batches, first):
        optimizer.zero_grad()
        architecture.loss(model, batch).backward()
        kfac.step()
        optimizer.step()
    with torch.no_grad():
        after = float(architecture.loss(model, first))
    assert after < before
    said = [str(warning.message) for warning in recwarn if "K-FAC" in str(warning.message)]
    assert len(said) == (name in UNTAKEN_CALLS)
    assert all(UNTAKEN_CALLS[name] in text for text in said)
