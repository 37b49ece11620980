"""Promise: attention, fused experts and tied words are layers with the factors of their definition.

The reference is the same model written with a Linear a projection, or both uses of a tied weight: autograd.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from transformers import MixtralConfig, MixtralForCausalLM

from kfac_core import KFAC, KFACConfig
from kfac_core.config import Execution
from tests.kfac_core.dense import factors, solve
from tests.kfac_core.layer_cases import loss

BATCH, LENGTH, WIDTH, HEADS = 3, 4, 4, 2
NOW = {"factor_decay": 0.0, "factor_update_steps": 1, "inverse_update_steps": 1, "loss_terms": "example"}
KINDS = {
    "self": {}, "no bias": {"bias": False}, "cross": {}, "keys are values": {},
    "other widths": {"kdim": 3, "vdim": 5}, "time first": {"batch_first": False},
}  # fmt: skip


class Attention(nn.Module):
    """Attention to `memory`, a function of the input, or to the input itself."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **{"batch_first": True, **KINDS[kind]})

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shifted = torch.tanh(x.roll(1, 1) + 1)
        if self.kind == "keys are values":
            return x, shifted, shifted
        if self.kind == "cross":
            return x, shifted, torch.sin(shifted)
        if self.kind == "other widths":
            return x, shifted[..., :3], torch.cat([shifted, x[..., :1]], -1)
        return x, x, x

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        if self.kind == "time first":
            q = k = v = x.transpose(0, 1)
        out = self.attention(q, k, v, need_weights=False)[0]
        return out.transpose(0, 1) if self.kind == "time first" else out


class Explicit(nn.Module):
    """The same of Linear layers."""

    def __init__(self, same: Attention) -> None:
        super().__init__()
        own = same.attention
        whole = own.in_proj_weight is not None
        weights = (
            own.in_proj_weight.chunk(3)
            if whole
            else (own.q_proj_weight, own.k_proj_weight, own.v_proj_weight)
        )
        biases = own.in_proj_bias.chunk(3) if own.in_proj_bias is not None else (None, None, None)
        self.operands = same.operands
        self.q_proj, self.k_proj, self.v_proj = (
            linear(weight, bias) for weight, bias in zip(weights, biases, strict=True)
        )
        self.out_proj = linear(own.out_proj.weight, own.out_proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        projections = zip((self.q_proj, self.k_proj, self.v_proj), self.operands(x), strict=True)
        heads = [project(part).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project, part in projections]
        q, k, v = heads
        weights = torch.softmax(q @ k.mT / (WIDTH // HEADS) ** 0.5, -1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    module = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None).double()
    with torch.no_grad():
        module.weight.copy_(weight)
        if bias is not None:
            module.bias.copy_(bias)
    return module


def attention_case(kind: str) -> tuple[Attention, Explicit, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Attention(kind).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    return model, Explicit(model), x, torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)


def by_name(kfac: KFAC) -> dict[str, tuple[Tensor, Tensor]]:
    found = kfac._factors.running
    return {s.name: (found[i, "a"][0], found[i, "g"][0]) for i, s in enumerate(kfac.shapes)}


@pytest.mark.parametrize(
    ("kind", "sequence", "execution"),
    [
        ("self", "expand", Execution.BATCHED), ("self", "reduce", Execution.SEQUENTIAL),
        ("no bias", "expand", Execution.SEQUENTIAL), ("cross", "expand", Execution.SEQUENTIAL),
        ("cross", "reduce", Execution.BATCHED), ("keys are values", "expand", Execution.BATCHED),
        ("other widths", "reduce", Execution.SEQUENTIAL), ("other widths", "expand", Execution.BATCHED),
        ("time first", "expand", Execution.SEQUENTIAL), ("time first", "reduce", Execution.BATCHED),
    ],
)  # fmt: skip
def test_attention_has_the_factors_of_four_linear_layers(kind, sequence, execution):
    model, explicit, x, y = attention_case(kind)
    kfac = KFAC(model, KFACConfig.sc20(**NOW, sequence=sequence), lr=0.1, execution=execution)
    torch.testing.assert_close(model(x), explicit(x))
    loss(model(x), y).backward()
    for parameter in model.parameters():
        parameter.grad = None
    kfac.discard()
    loss(model(x), y).backward()
    kfac.step()
    got, want = by_name(kfac), factors(explicit, x, y, loss, sequence)
    assert set(got) == {f"attention.{name}" for name in want}
    assert kfac.plain_modules == []
    for name, ((a,), (g,)) in want.items():
        torch.testing.assert_close(got[f"attention.{name}"][0], a, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(got[f"attention.{name}"][1], g, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["self", "other widths"])
def test_the_rows_of_the_joint_weight_take_the_dense_step(kind):
    model, explicit, x, y = attention_case(kind)
    kfac = KFAC(model, KFACConfig.sc20(**NOW, damping=0.1, kl_clip=None), lr=0.1)
    loss(model(x), y).backward()
    loss(explicit(x), y).backward()
    kfac.step()
    own = model.attention
    biases = own.in_proj_bias.grad.chunk(3)
    weights = (
        own.in_proj_weight.grad.chunk(3) if own.in_proj_weight is not None
        else [getattr(own, f"{part}_proj_weight").grad for part in "qkv"]
    )  # fmt: skip
    got = dict(zip(("q_proj", "k_proj", "v_proj"), zip(weights, biases, strict=True), strict=True))
    got["out_proj"] = own.out_proj.weight.grad, own.out_proj.bias.grad
    for name, ((a,), (g,)) in factors(explicit, x, y, loss).items():
        module = getattr(explicit, name)
        gradient = torch.cat([module.weight.grad, module.bias.grad[:, None]], 1)
        want = solve("eigen", 0.1, a, g, gradient, (0.0, 0.0))
        weight, bias = got[name]
        assert (torch.cat([weight, bias[:, None]], 1) - want).norm() <= 1e-8 * want.norm()


def test_a_transformer_encoder_is_taken_whole_in_training_whatever_its_fast_path():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).double()
    kfac = KFAC(model, KFACConfig.sc20(**NOW), lr=0.1)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        model(x)  # may take the fast path
    model.train()
    model(x).square().mean().backward()
    assert all(statistics.shares() is not None for statistics in kfac._capture.statistics)
    assert len(kfac.shapes) == 2 * 6
    plain = functional.linear
    kfac.step()
    assert functional.linear is plain


def test_an_error_inside_attention_leaves_torch_as_it_was():
    plain = functional.linear
    model = nn.MultiheadAttention(4, 2)
    kfac = KFAC(model, KFACConfig.sc20(), lr=0.1)
    with pytest.raises(AssertionError, match="embedding dimension"):
        model(*3 * [torch.randn(2, 3, 5)])
    assert functional.linear is plain
    kfac.remove()


def test_a_copy_of_an_attention_model_is_a_plain_model():
    model = nn.MultiheadAttention(4, 2)
    kfac = KFAC(model, KFACConfig.sc20(), lr=0.1)
    other = copy.deepcopy(model)
    other(*3 * [torch.randn(2, 3, 4)])[0].sum().backward()
    assert all(statistics.shares() is None for statistics in kfac._capture.statistics)


def mixtral(implementation: str) -> nn.Module:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=11, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=16,
        experts_implementation=implementation,
    )  # fmt: skip
    return MixtralForCausalLM(config).double()


def test_fused_experts_are_a_layer_an_expert_and_weight_that_counts_all_tokens():
    model = mixtral("eager")
    tokens = torch.tensor(
        [[1, 5, 2], [7, 4, 3]]
    )  # fewer rows an expert than features: g follows from the gradient
    observed: dict[int, list[Tensor]] = {}
    experts = next(m for m in model.modules() if type(m).__name__ == "MixtralExperts")
    kfac = KFAC(model, KFACConfig.sc20(**{**NOW, "loss_terms": None}), lr=0.1)
    experts.register_forward_pre_hook(lambda _, args: observed.update({0: [arg.detach() for arg in args]}))
    logits = model(input_ids=tokens).logits
    functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
    gradient = experts.gate_up_proj.grad.clone()
    kfac.step()
    got = {name: factor for name, factor in by_name(kfac).items() if "gate_up_proj" in name}
    assert len(got) == 3
    states, chosen, _ = observed[0]
    for name, (a, g) in got.items():
        expert = int(name.rpartition(".")[2])
        seen = states[(chosen == expert).any(1)]
        torch.testing.assert_close(a, seen.T @ seen / len(seen), rtol=1e-10, atol=1e-14)
        rows = torch.linalg.lstsq(seen.T, gradient[expert].T).solution
        torch.testing.assert_close(rows.T @ seen, gradient[expert], rtol=1e-8, atol=1e-12)
        torch.testing.assert_close(g, tokens.numel() * rows.T @ rows, rtol=1e-8, atol=1e-12)


def test_experts_that_run_together_are_left_plain_and_named():
    kfac = KFAC(mixtral("batched_mm"), KFACConfig.sc20(), lr=0.1)
    assert any("MixtralExperts" in name for name in kfac.plain_modules)


WORDS, FEATURES, TOKENS, DAMPING = 7, 3, 4, 0.01
TIED_NOW = {
    "factor_decay": 0.0,
    "factor_update_steps": 1,
    "inverse_update_steps": 1,
    "damping": DAMPING,
    "kl_clip": None,
}


class Tied(nn.Module):
    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, FEATURES).double()
        self.mix = nn.Linear(FEATURES, FEATURES).double()
        self.head = nn.Linear(FEATURES, WORDS, bias=bias).double()
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(tokens))))


def tokens_of(world_size: int) -> tuple[Tensor, Tensor]:
    """Rank r has r + 1 sequences."""
    generator = torch.Generator().manual_seed(2)
    size = (world_size * (world_size + 1) // 2, TOKENS)
    return tuple(torch.randint(0, WORDS, size, generator=generator) for _ in range(2))  # type: ignore[return-value]


def tied_step(
    rank: int, world_size: int, options: dict[str, Any], execution: Execution
) -> tuple[dict[str, Tensor], Tensor]:
    model, (x, y) = Tied(), tokens_of(world_size)
    mine = slice(rank * (rank + 1) // 2, (rank + 1) * (rank + 2) // 2)
    kfac = KFAC(model, KFACConfig.sc20(**TIED_NOW, **options), lr=0.1, execution=execution)
    functional.cross_entropy(model(x[mine]).flatten(0, 1), y[mine].flatten()).backward()
    for parameter in model.parameters():
        parameter.grad *= len(x[mine]) / len(x)  # a mean over the world's tokens
        if world_size > 1:
            dist.all_reduce(parameter.grad)
    kfac.step()
    index = [shape.name for shape in kfac.shapes].index("embedding")
    running = {kind: kfac._factors.running.get((index, kind)) for kind in "ag"}
    kfac.remove()
    return {
        kind: factor for kind, factor in running.items() if factor is not None
    }, model.embedding.weight.grad


def tied_reference(world_size: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """The words' diagonal, the features' factor, the gradient, and the trace of the sum of both uses."""
    model, (x, y) = Tied(), tokens_of(world_size)
    count = x.numel()
    inner = model.embedding(x)
    inner.retain_grad()
    hidden = torch.tanh(model.mix(inner))
    scores = hidden @ model.head.weight.T
    scores.retain_grad()
    functional.cross_entropy(scores.flatten(0, 1), y.flatten()).backward()
    g, delta = inner.grad.reshape(-1, FEATURES) * count, scores.grad.reshape(-1, WORDS) * count
    hidden = hidden.detach().reshape(-1, FEATURES)
    uses = [
        (torch.bincount(x.flatten(), minlength=WORDS).double() / count, g.T @ g / count),
        (delta.square().sum(0) / count, hidden.T @ hidden / count),
    ]
    trace = sum(float(u.sum() * w.trace()) for u, w in uses)
    words = sum(u * w.trace() for u, w in uses) / trace
    return words, sum(w * u.sum() for u, w in uses), model.embedding.weight.grad, trace


@pytest.mark.parametrize(
    ("world_size", "options", "execution"),
    [
        (1, {}, Execution.BATCHED), (1, {"solver": "inverse"}, Execution.SEQUENTIAL),
        (2, {"strategy": "mem_opt"}, Execution.BATCHED), (3, {"overlap_factors": True}, Execution.SEQUENTIAL),
        (4, {"strategy": "hybrid_opt", "grad_worker_fraction": 0.5}, Execution.SEQUENTIAL),
    ],
)  # fmt: skip
def test_a_tied_weight_has_the_partial_traces_of_both_uses_whatever_the_ranks(
    world, world_size, options, execution
):
    words, features, gradient, trace = tied_reference(world_size)
    seen = set()
    for running, got in world(world_size).run(tied_step, options, execution):
        if "a" in running:
            torch.testing.assert_close(running["a"].flatten(), words, rtol=1e-10, atol=1e-14)
        if "g" in running:
            torch.testing.assert_close(running["g"][0], features, rtol=1e-10, atol=1e-14)
            assert float(running["g"][0].trace()) == pytest.approx(trace, rel=1e-10)
        seen |= running.keys()
        if options.get("solver") == "inverse":
            eye = torch.eye(FEATURES, dtype=torch.float64)
            want = torch.linalg.solve(features + DAMPING * eye, gradient.T).T / (words + DAMPING)[:, None]
        else:
            system = torch.kron(words.diag(), features) + DAMPING * torch.eye(
                WORDS * FEATURES, dtype=torch.float64
            )
            want = torch.linalg.solve(system, gradient.flatten()).view_as(gradient)
        assert (got - want).norm() <= 1e-8 * want.norm()
    assert seen == {"a", "g"}


def test_the_heads_bias_and_a_skipped_tie_stay_plain():
    model = Tied(bias=True)
    kfac = KFAC(model, KFACConfig.sc20(), lr=0.1)
    assert [shape.name for shape in kfac.shapes] == ["embedding", "mix"]
    assert kfac.plain_modules == ["head (Linear)"]  # its bias
    kfac.remove()
    for skip in ("head", "embedding"):
        kfac = KFAC(model, KFACConfig.sc20(skip=(skip,)), lr=0.1)
        assert [shape.name for shape in kfac.shapes] == ["mix"]
        kfac.remove()


def test_a_tie_of_other_modules_stays_plain():
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Linear(3, 2))
    model[2].weight = model[0].weight
    kfac = KFAC(model, KFACConfig.sc20(), lr=0.1)
    assert [shape.name for shape in kfac.shapes] == ["3"]
    assert kfac.plain_modules == ["0 (Linear)", "2 (Linear)"]
