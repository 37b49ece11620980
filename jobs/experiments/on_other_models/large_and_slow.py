"""Layers with many outputs, the default kl-clip, and AdamW behind K-FAC."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from jobs.experiments.on_other_models.messages import messages
from kfac_core import KFAC, KFACConfig
from tests.kfac_core.architectures import ARCHITECTURES, made


def answers() -> Iterator[tuple[str, str]]:
    """Bytes from the placement; seconds are of this machine, one thread."""
    yield "bytes of the factors of an output layer of 12,000 words", _bytes(12_000)
    for words in (2_000, 4_000, 9_000):
        yield f"seconds of a step that solves, {words:,} words", _seconds(words)
    yield "gpt2, 40 steps: loss with the default kl-clip and with 0.03", kl_clip()
    yield "AdamW behind K-FAC", adaptive()


def _bytes(words: int) -> str:
    kfac = KFAC(nn.Sequential(nn.Linear(16, words)), KFACConfig(), lr=0.1)
    return f"{kfac.memory()['factors']:,}"


def _seconds(words: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, words))
    kfac = KFAC(model, KFACConfig(factor_update_steps=1, inverse_update_steps=1), lr=0.1)
    functional.cross_entropy(model(torch.randn(64, 16)), torch.randint(0, words, (64,))).backward()
    start = time.perf_counter()
    kfac.step()
    return f"{time.perf_counter() - start:.2g}"


def kl_clip() -> str:
    """SGD with momentum at 0.1."""
    losses, said = [], ""
    for config in (KFACConfig, lambda **options: KFACConfig(kl_clip=0.03, **options)):
        model, each = made("gpt2"), ARCHITECTURES["gpt2"]
        optimizer, batches = torch.optim.SGD(model.parameters(), 0.1, 0.9), each.batches()
        with messages() as kept:
            kfac = KFAC(model, config(factor_update_steps=1, inverse_update_steps=2), lr=optimizer)
            for step in range(40):
                optimizer.zero_grad()
                loss = each.loss(model, batches[step % len(batches)])
                loss.backward()
                kfac.step()
                optimizer.step()
        losses.append(float(loss.detach()))
        said = said or "; ".join(text for _, text in kept.logged if "kl-clip has" in text)[:110]
    return f"{losses[0]:.3f} and {losses[1]:.3f}; {f'says: {said}' if said else 'no word'}"


def adaptive() -> str:
    """Only what is said."""
    model = nn.Sequential(nn.Linear(3, 3))
    with messages() as kept:
        KFAC(model, KFACConfig(), lr=torch.optim.AdamW(model.parameters()))
    return kept.said()
