"""What mistakes around K-FAC do, and whether they are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from jobs.experiments.on_other_models.messages import messages
from kfac_core import KFAC, KFACConfig

EVERY_STEP = {"factor_update_steps": 1, "inverse_update_steps": 1}


def answers() -> Iterator[tuple[str, str]]:
    """One a mistake."""
    for solver in ("eigen", "inverse"):
        yield f"float32 off float64, rank 8, inputs x 100, damping 0.001, {solver}", rounding(solver)
    question = "largest loss of 100 steps in float32, damping 1e-12, kl-clip 0.03"
    yield f"{question}, inputs x 100", tiny_damping(100, 0.3, random=False)
    yield f"{question}, inputs x 1000", tiny_damping(1000, 0.1, random=True)
    yield "one inf in one gradient, no scaler", infinite()
    yield "loss scale left in: unscale_ forgotten", forgotten_unscale()
    yield "loss scale left in: scaler not passed", scaler_not_passed()
    yield "layers added and unfrozen later", later(_add)
    yield "layer replaced later", later(_replace)
    yield "resize_token_embeddings of GPT-2", resized_words()


def net() -> nn.Sequential:
    """Always of the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def backward(model: nn.Module, seed: int = 0, scale: float = 1.0) -> float:
    """One batch of a task that can be learnt; returns the loss."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(16, 4, generator=generator)
    loss = functional.cross_entropy(model(x), x[:, :3].argmax(1))
    model.zero_grad()
    (loss * scale).backward()
    return float(loss.detach())


def steps_of(dtype: torch.dtype, solver: str) -> list[Tensor]:
    """Preconditioned gradients of inputs of rank 8 of 64."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.randn(8, 64, dtype=torch.float64, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 10, bias=False)).double()
    model[0].weight.data /= 100
    model = model.to(dtype)
    config = KFACConfig(solver=solver, damping=1e-3, kl_clip=None, factor_start="first", **EVERY_STEP)
    kfac, found = KFAC(model, config, lr=0.1), []
    for _ in range(3):
        x = 100 * torch.randn(64, 8, dtype=torch.float64, generator=generator) @ basis
        y = torch.randint(0, 10, (64,), generator=generator)
        model.zero_grad()
        functional.cross_entropy(model(x.to(dtype)), y).backward()
        kfac.step()
        found.append(model[0].weight.grad.double().clone())
    return found


def rounding(solver: str) -> str:
    """The largest relative distance of three steps."""
    with messages() as kept:
        got = steps_of(torch.float32, solver)
    want = steps_of(torch.float64, solver)
    off = max(float((g - w).norm() / w.norm()) for g, w in zip(got, want, strict=True))
    return f"{off:.3g} times its norm; {kept.said()}"


def tiny_damping(scale: float, lr: float, *, random: bool) -> str:
    """Inputs of rank 8 of 64, SGD with momentum; labels of the inputs, or random."""
    largest, said = [], []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        basis, model = torch.randn(8, 64), nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        model[0].weight.data /= scale
        model = model.to(dtype)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr, 0.9), []
        with messages() as kept:
            kfac = KFAC(model, KFACConfig(damping=1e-12, kl_clip=0.03, **EVERY_STEP), lr=optimizer)
            for _ in range(100):
                x = torch.randn(64, 8) @ basis * scale
                y = torch.randint(0, 10, (64,)) if random else x[:, :10].argmax(1)
                loss = functional.cross_entropy(model(x.to(dtype)), y)
                optimizer.zero_grad()
                loss.backward()
                kfac.step()
                optimizer.step()
                losses.append(float(loss.detach()))
        largest.append(max(losses))
        said.append(kept.said())
    return f"{largest[0]:.3g} (float64: {largest[1]:.3g}); {said[0]}"


def infinite() -> str:
    """In the last layer, with the default kl-clip."""
    model = net()
    with messages() as kept:
        kfac = KFAC(model, KFACConfig(**EVERY_STEP), lr=0.1)
        for step in range(4):
            backward(model, step)
            if step == 1:
                model[4].weight.grad[0, 0] = torch.inf
            kfac.step()
            if step == 1:
                broken = sum(not bool(p.grad.isfinite().all()) for p in model.parameters())
                zero = sum(not bool(p.grad.count_nonzero()) for p in model.parameters())
    return f"of 6 gradients {broken} are not finite, {zero} are zero; {kept.said()}"


def trained(*, unscales: bool, passed: bool, steps: int = 60) -> tuple[float, str]:
    """The mean loss of the last ten steps, and what was said; the scale is 1024."""
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.1, 0.9), []
    with messages() as kept:
        kfac = KFAC(model, KFACConfig(**EVERY_STEP), lr=optimizer, grad_scaler=scaler if passed else None)
        for step in range(steps):
            losses.append(backward(model, step, float(scaler.scale(torch.ones(())))))
            if unscales:
                scaler.unscale_(optimizer)
            kfac.step()
            scaler.step(optimizer)
            scaler.update()
    return sum(losses[-10:]) / 10, kept.said()


def forgotten_unscale() -> str:
    """The loss without, and with it."""
    (wrong, said), (right, _) = trained(unscales=False, passed=True), trained(unscales=True, passed=True)
    return f"loss {wrong:.3f} in the place of {right:.3f}; {said}"


def scaler_not_passed() -> str:
    """The loss without, and with it."""
    (wrong, said), (right, _) = trained(unscales=True, passed=False), trained(unscales=True, passed=True)
    return f"loss {wrong:.3f} in the place of {right:.3f}; {said}"


def _add(model: nn.Sequential) -> None:
    model[0].weight.requires_grad_()
    model.append(nn.Linear(3, 3))


def _replace(model: nn.Sequential) -> None:
    model[4] = nn.Linear(6, 3)


def later(change: Callable[[nn.Sequential], None]) -> str:
    """Two steps after a change of the model."""
    model = net()
    if change is _add:
        model[0].weight.requires_grad_(requires_grad=False)
    with messages() as kept:
        kfac = KFAC(model, KFACConfig(**EVERY_STEP), lr=0.1)
        backward(model)
        kfac.step()
        change(model)
        try:
            for step in range(2):
                backward(model, step)
                kfac.step()
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:150]
    return kept.said()


def resized_words() -> str:
    """Four words more."""
    import transformers  # noqa: PLC0415  an extra

    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_positions=8, n_embd=8, n_layer=1, n_head=2, tie_word_embeddings=False
    )
    model = transformers.GPT2LMHeadModel(config).train()
    kfac = KFAC(model, KFACConfig(**EVERY_STEP), lr=0.1)
    tokens, where = torch.arange(16).view(2, 8), "step"
    try:
        for _ in range(2):
            where = "backward pass"
            model(input_ids=tokens, labels=tokens).loss.backward()
            where = "step"
            kfac.step()
            model.resize_token_embeddings(20, mean_resizing=False)
            model.zero_grad()
    except Exception as error:
        return f"{type(error).__name__} in the {where}: {error}"[:200]
    return "no word"
