"""How many times the Kronecker-factored Fisher of the loss is that of K-FAC; 1 is right."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from jobs.experiments.on_other_models.messages import messages
from kfac_core import KFAC, KFACConfig

BATCH, TOKENS, WIDTH, OUTPUTS = 64, 8, 3, 2
NOW = {"factor_decay": 0.0, "factor_update_steps": 1, "inverse_update_steps": 1}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "[B, T, F]": lambda x: x,
    "[B * T, F]": lambda x: x.flatten(0, 1),
    "[T, B, F]": lambda x: x.transpose(0, 1),
}


def answers() -> Iterator[tuple[str, str]]:
    """All in float64, by traces: a Kronecker product's is the product of its factors'."""
    for layout, arrange in LAYOUTS.items():
        yield f"mean over tokens, {layout}, B = 64, T = 8", token_loss(arrange)
    yield "one Swin block, layers on 64 images and on 4 windows of each", windows()
    for shape in ((TOKENS,), (1, TOKENS), (BATCH, TOKENS)):
        yield f"embedding of positions {list(shape)}, mean over tokens", positions(shape)
    yield "expert that sees 100 of 600 tokens", expert()
    yield "embedding's weight used again by functional.linear", functional_tie()


def numbers(*size: int) -> Tensor:
    """Always the same."""
    return torch.randn(*size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def traces(model: nn.Module, loss: Callable[[], Tensor]) -> dict[str, float]:
    """The trace of A ⊗ G of each layer."""
    kfac = KFAC(model, KFACConfig(**NOW), lr=0.1)
    loss().backward()
    kfac.step()
    factors = kfac.state_dict()["factors"]
    kfac.remove()
    return {name: _trace(factors[f"{name}.a"]) * _trace(factors[f"{name}.g"]) for name in _names(factors)}


def _names(factors: dict[str, Tensor]) -> list[str]:
    return [name.removesuffix(".a") for name in factors if name.endswith(".a")]


def _trace(factor: Tensor) -> float:
    """Of one block, whole or a diagonal."""
    return float(factor.sum() if 1 in factor.shape[-2:] else torch.block_diag(*factor).trace())


def _fisher(a: Tensor, b: Tensor, terms: int) -> float:
    """From inputs and the gradients of each loss term's own loss, both by rows."""
    return float(a.square().sum() / len(a) * b.square().sum() / terms)


def token_loss(arrange: Callable[[Tensor], Tensor]) -> str:
    """A linear model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, OUTPUTS, bias=False)).double()
    x, y = numbers(BATCH, TOKENS, WIDTH), numbers(BATCH, TOKENS, OUTPUTS)
    got = traces(model, lambda: (model(arrange(x)) - arrange(y)).square().sum(-1).mean())["0"]
    b = 2 * (x @ model[0].weight.T - y).detach()
    return f"{_fisher(x.flatten(0, 1), b.flatten(0, 1), BATCH * TOKENS) / got:.4f}"


class Windows(nn.Module):
    """A layer on the sequence, and one on windows of it, side by side in the batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.window = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.head = nn.Linear(WIDTH, OUTPUTS)
        self.seen: dict[str, tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        """From [B, 16, F] to [B, outputs]."""
        x = torch.tanh(self._called("whole", x))
        x = torch.tanh(self._called("window", x.reshape(-1, 4, WIDTH))).reshape(len(x), 16, WIDTH)
        return self.head(x.mean(1))

    def _called(self, name: str, x: Tensor) -> Tensor:
        out: Tensor = getattr(self, name)(x)
        out.register_hook(lambda g: self.seen.__setitem__(name, (x.detach(), g)))
        return out


def windows() -> str:
    """The per-image Fisher by positions, of both layers."""
    torch.manual_seed(0)
    model, x, y = Windows().double(), numbers(BATCH, 16, WIDTH), numbers(BATCH, OUTPUTS)
    got = traces(model, lambda: (model(x) - y).square().sum(1).mean())
    found = []
    for name in ("whole", "window"):
        a, g = (each.reshape(-1, WIDTH) for each in model.seen[name])
        found.append(f"{_fisher(a, g * BATCH, BATCH) / got[name]:.4f}")
    return " and ".join(found)


class Positions(nn.Module):
    """Adds an embedding of the positions, which it asks for in some shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, OUTPUTS)
        self.shape, self.gradient = shape, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        """From [B, T, F] to [B, T, outputs]."""
        out = self.embedding(torch.arange(TOKENS).expand(self.shape))
        out.register_hook(lambda g: setattr(self, "gradient", g))
        return self.head(torch.tanh(x + out))


def positions(shape: tuple[int, ...]) -> str:
    """A diagonal of 1 / T, and gradients that count the batch's tokens."""
    torch.manual_seed(0)
    model, x = Positions(shape).double(), numbers(BATCH, TOKENS, WIDTH)
    y = numbers(BATCH, TOKENS, OUTPUTS)
    got = traces(model, lambda: (model(x) - y).square().sum(-1).mean())["embedding"]
    return f"{float(model.gradient.square().sum()) * BATCH * TOKENS / got:.4f}"


def expert() -> str:
    """K-FAC's factors over those of all tokens, where the others' gradient is zero."""
    torch.manual_seed(0)
    experts = nn.ModuleList(nn.Linear(WIDTH, OUTPUTS, bias=False) for _ in range(2)).double()

    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = experts

        def forward(self, x: Tensor) -> Tensor:
            chosen = torch.arange(600).view(60, 10) < 500
            out = x.new_zeros(60, 10, OUTPUTS)
            out[chosen], out[~chosen] = self.experts[0](x[chosen]), self.experts[1](x[~chosen])
            return out

    model, x, y = Mixture(), numbers(60, 10, WIDTH), numbers(60, 10, OUTPUTS)
    got = traces(model, lambda: (model(x) - y).square().sum(-1).mean())["experts.1"]
    a = x.flatten(0, 1)[500:]
    b = 2 * (a @ experts[1].weight.T - y.flatten(0, 1)[500:]).detach()
    return f"{_fisher(a, b, 600) / got:.4f}"


def functional_tie() -> str:
    """The trace of the sum of both uses, and of K-FAC's block."""
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.mix = nn.Embedding(7, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.parts: dict[str, Tensor] = {}

        def forward(self, tokens: Tensor) -> Tensor:
            inner = self.embedding(tokens)
            hidden = torch.tanh(self.mix(inner))
            scores = functional.linear(hidden, self.embedding.weight)
            inner.register_hook(lambda g: self.parts.__setitem__("inner", g))
            scores.register_hook(lambda g: self.parts.__setitem__("scores", g))
            self.parts["hidden"] = hidden.detach()
            return scores

    model, tokens = Tied().double(), torch.arange(48).view(12, 4) % 7
    with messages() as kept:
        kfac = KFAC(model, KFACConfig(**NOW), lr=0.1)
        for _ in range(2):
            functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flip(0).flatten()).backward()
            kfac.step()
            if "trace" not in locals():
                factors = kfac.state_dict()["factors"]
                trace = _trace(factors["embedding.a"]) * _trace(factors["embedding.g"])
                own = model.parts["inner"].square().sum() * 48
                second = model.parts["hidden"].square().sum() / 48 * model.parts["scores"].square().sum() * 48
    return f"trace {float(own + second):.3f}, K-FAC's {trace:.3f}; {kept.said()}"
