"""Promise: attention's projections and fused experts are layers with the factors of their definition.

The reference is the same model written with a Linear a projection, whose factors come from autograd.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import MixtralConfig, MixtralForCausalLM

from kfac_core import KFAC, KFACConfig
from kfac_core.config import Execution
from tests.kfac_core.dense import solve
from tests.kfac_core.layer_cases import loss
from tests.kfac_core.per_example import factors

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


@pytest.mark.parametrize("execution", Execution)
@pytest.mark.parametrize("sequence", ["expand", "reduce"])
@pytest.mark.parametrize("kind", KINDS)
def test_attention_has_the_factors_of_four_linear_layers(kind, sequence, execution):
    model, explicit, x, y = attention_case(kind)
    kfac = KFAC(model, KFACConfig(**NOW, sequence=sequence), lr=0.1, execution=execution)
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
    kfac = KFAC(model, KFACConfig(**NOW, damping=0.1, kl_clip=None), lr=0.1)
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
    kfac = KFAC(model, KFACConfig(**NOW), lr=0.1)
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
    kfac = KFAC(model, KFACConfig(), lr=0.1)
    with pytest.raises(AssertionError, match="embedding dimension"):
        model(*3 * [torch.randn(2, 3, 5)])
    assert functional.linear is plain
    kfac.remove()


def test_a_copy_of_an_attention_model_is_a_plain_model():
    model = nn.MultiheadAttention(4, 2)
    kfac = KFAC(model, KFACConfig(), lr=0.1)
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
    kfac = KFAC(model, KFACConfig(**{**NOW, "loss_terms": None}), lr=0.1)
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
    kfac = KFAC(mixtral("batched_mm"), KFACConfig(), lr=0.1)
    assert any("MixtralExperts" in name for name in kfac.plain_modules)


def test_parametrised_weights_are_left_plain_and_named():
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 3),
        nn.utils.parametrizations.spectral_norm(nn.Conv1d(3, 3, 1)),
    )  # fmt: skip
    kfac = KFAC(model, KFACConfig(), lr=0.1)
    assert [shape.name for shape in kfac.shapes] == ["1"]
    assert [name for name in kfac.plain_modules if "Parametrized" in name] == [
        "0 (ParametrizedLinear)", "2 (ParametrizedConv1d)",
    ]  # fmt: skip
