"""Which share of the trained parameters a step changes the gradients of, and how loudly the rest is named."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from jobs.experiments.on_other_models.messages import messages
from kfac_core import KFAC, KFACConfig
from tests.kfac_core.architectures import ARCHITECTURES, made

NAMES = "gpt2", "lstm", "mixtral", "transformer encoder", "llama, tied", "weight norm"


def answers() -> Iterator[tuple[str, str]]:
    """One an architecture."""
    for name in NAMES:
        each = ARCHITECTURES[name]
        yield f"share taken, {name}", taken(made(name), lambda m, e=each: e.loss(m, e.batches()[0]))
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.ConvTranspose2d(8, 3, 2, 2))
    yield "share taken, transposed convolution", taken(model, lambda m: functional.mse_loss(m(x), x))


def taken(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> str:
    """The share by what a step without kl-clip changes, and the loudest message about it."""
    config = KFACConfig(kl_clip=None, damping=0.01, factor_update_steps=1, inverse_update_steps=1)
    with messages() as kept:
        kfac = KFAC(model, config, lr=0.1)
    loss(model).backward()
    trained = [p for p in model.parameters() if p.grad is not None]
    before = [p.grad.clone() for p in trained]
    kfac.step()
    changed = sum(p.numel() for p, old in zip(trained, before, strict=True) if not torch.equal(p.grad, old))
    share = changed / sum(p.numel() for p in trained)
    levels = {level for level, text in kept.logged if "plain" in text or "trained parameters" in text}
    loudest = "WARNING" if "WARNING" in levels else "INFO" if levels else "nothing"
    return f"{100 * share:.1f} %, {loudest}"
