"""Promise: loss terms are counted from what the loss is made of, whatever K-FAC takes and whatever else runs.

The reference is the definition: sums of outer products of inputs and gradients that hooks of the test's own
see, scaled by the number of loss terms that the test knows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from kfac_core import KFAC, KFACConfig
from kfac_core.config import Execution
from kfac_core.errors import ConfigError

BATCH, TOKENS, WIDTH, OUTPUTS = 6, 4, 3, 2
NOW = {"factor_decay": 0.0, "factor_update_steps": 1, "inverse_update_steps": 1}
Seen = dict[str, tuple[Tensor, Tensor]]
Loss = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def numbers(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def squares(output: Tensor) -> Tensor:
    """A mean over all positions of the squares' sum over the features, which are last."""
    return output.square().sum(-1).mean()


def watched(model: nn.Module) -> Seen:
    """Inputs and gradients of the layers' last calls, as rows."""
    seen: Seen = {}

    def hook(name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if torch.is_grad_enabled() and module.training:
                a = args[0].detach()
                output.register_hook(lambda g: seen.__setitem__(name, (a, g)))

        return see

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.register_forward_hook(hook(name))
    return seen


def as_rows(tensor: Tensor, *, with_ones: bool = False) -> Tensor:
    rows = tensor.reshape(-1, tensor.shape[-1])
    return torch.cat([rows, rows.new_ones(len(rows), 1)], 1) if with_ones else rows


def assert_counts(kfac: KFAC, seen: Seen, layer: str, terms: int) -> None:
    """A = 1/(M max(S, 1)) sum a aT and G = N max(S, 1) sum g gT, for M rows and S = M/N."""
    index = [shape.name for shape in kfac.shapes].index(layer)
    a, g = as_rows(seen[layer][0], with_ones=True), as_rows(seen[layer][1])
    positions = max(len(a) / terms, 1)
    want = a.T @ a / (len(a) * positions), g.T @ g * terms * positions
    for kind, each in zip("ag", want, strict=True):
        got = kfac._factors.running[index, kind][0]
        torch.testing.assert_close(got, each, rtol=1e-10, atol=0)


def stepped(model: nn.Module, x: Tensor, loss: Loss, **options: object) -> tuple[KFAC, Seen]:
    execution = options.pop("execution", None)
    kfac, seen = KFAC(model, KFACConfig.sc20(**NOW, **options), lr=0.1, execution=execution), watched(model)
    loss(model(x)).backward()
    kfac.step()
    kfac.remove()
    return kfac, seen


class OwnLinear(nn.Linear):
    """A subclass, which K-FAC does not take."""


class Words(nn.Module):
    """A trunk on `[B, T, F]` or on `[B * T, F]`, and a score of each token by a head."""

    def __init__(self, head: nn.Module, *, flat: bool) -> None:
        super().__init__()
        self.trunk, self.head, self.flat = nn.Linear(WIDTH, 5), head, flat
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.trunk(x.flatten(0, 1) if self.flat else x).tanh()
        return self.head(hidden).view(*x.shape[:2], -1)


class Free(nn.Module):
    """A matrix that is applied without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(OUTPUTS, 5))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.matrix)


def frozen() -> nn.Module:
    return nn.Linear(5, OUTPUTS).requires_grad_(requires_grad=False)


HEADS: dict[str, tuple[Callable[[], nn.Module], dict[str, object]]] = {
    "taken": (lambda: nn.Linear(5, OUTPUTS), {}),
    "skipped": (lambda: nn.Linear(5, OUTPUTS), {"skip": ("head",)}),
    "frozen": (frozen, {}),
    "frozen, in eval mode": (lambda: frozen().eval(), {}),
    "a subclass": (lambda: OwnLinear(5, OUTPUTS), {}),
    "no layer": (Free, {}),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(5, OUTPUTS)), {}),
}


@pytest.mark.parametrize(
    ("head", "flat"), [("taken", True), *((head, place % 2 == 1) for place, head in enumerate(HEADS))]
)
def test_a_head_that_is_not_taken_leaves_the_count_of_the_other_layers_as_it_is(head, flat):
    make, options = HEADS[head]
    model = Words(make(), flat=flat)
    kfac, seen = stepped(model, numbers(BATCH, TOKENS, WIDTH), squares, **options)
    assert_counts(kfac, seen, "trunk", BATCH * TOKENS)


@pytest.mark.filterwarnings("ignore:K-FAC. no statistics")
def test_a_head_that_is_frozen_for_a_while_counts_too():
    model = Words(nn.Linear(5, OUTPUTS), flat=True)
    kfac, seen = KFAC(model, KFACConfig.sc20(**NOW), lr=0.1), watched(model)
    model.head.requires_grad_(requires_grad=False)
    squares(model(numbers(BATCH, TOKENS, WIDTH))).backward()
    kfac.step()
    assert_counts(kfac, seen, "trunk", BATCH * TOKENS)


def own_layers(rank: int, world_size: int) -> list[str]:
    """The layers that this rank keeps, whose factors are those of its own batch."""
    torch.manual_seed(0)
    model = Words(nn.Linear(5, OUTPUTS), flat=True)
    kfac, seen = stepped(model, numbers(BATCH, TOKENS, WIDTH), squares, strategy="dp_kfac")
    own = {kfac.shapes[layer].name for layer, _ in kfac._factors.running}
    for name in own:
        assert_counts(kfac, seen, name, BATCH * TOKENS)
    return sorted(own)


def test_a_rank_that_has_the_head_of_another_rank_counts_as_that_does(world):
    assert world(2).run(own_layers) == [["trunk"], ["head"]]


class Reshaped(nn.Module):
    """A head of `features` at each token, and what becomes of its scores."""

    def __init__(self, features: int, shape: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.trunk, self.head, self.shape = nn.Linear(WIDTH, 5), nn.Linear(5, features), shape
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.shape(self.head(self.trunk(x).tanh()))


def entropy(scores: Tensor) -> Tensor:
    """A label at each position; scores are `[B, classes, ...]`."""
    labels = torch.arange(scores[:, 0].numel()).view(scores[:, 0].shape).remainder(scores.shape[1])
    return functional.cross_entropy(scores, labels)


def logistic(scores: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))


RESHAPED: dict[str, tuple[int, Callable[[Tensor], Tensor], Loss, int]] = {
    "[B, F, T]": (OUTPUTS, lambda y: y.mT, entropy, BATCH * TOKENS),
    "[B, T]": (1, lambda y: y.squeeze(-1), logistic, BATCH * TOKENS),
    "[B, F, 2 T]": (
        OUTPUTS, lambda y: functional.interpolate(y.mT, scale_factor=2.0), entropy, BATCH * TOKENS * 2,
    ),
    "[B, 2 T]": (
        1, lambda y: functional.interpolate(y.mT, scale_factor=2.0).squeeze(1), logistic, BATCH * TOKENS * 2,
    ),
    "[B, T, 1, F]": (OUTPUTS, lambda y: y.unsqueeze(2), squares, BATCH * TOKENS),
    "[B, T, 2, F / 2]": (2 * OUTPUTS, lambda y: y.unflatten(-1, (2, -1)), squares, BATCH * TOKENS),
}  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "execution"), [(shape, [*Execution][place % 2]) for place, shape in enumerate(RESHAPED)]
)
def test_stated_tokens_are_counted_in_every_shape_of_the_scores(shape, execution):
    features, reshape, loss, terms = RESHAPED[shape]
    model = Reshaped(features, reshape)
    x = numbers(BATCH, TOKENS, WIDTH)
    kfac, seen = stepped(model, x, loss, loss_terms="token", execution=execution)
    assert_counts(kfac, seen, "trunk", terms)
    assert_counts(kfac, seen, "head", terms)


@pytest.mark.parametrize(
    ("features", "shape", "stated"),
    [
        (OUTPUTS, lambda y: y.mT, None),
        (1, lambda y: y.squeeze(-1), None),
        (OUTPUTS, lambda y: y.mean(-1), "token"),
    ],
)
def test_a_count_that_is_a_guess_is_a_warning_once_that_names_the_statement(features, shape, stated, recwarn):
    model = Reshaped(features, shape)
    kfac = KFAC(model, KFACConfig.sc20(**NOW, loss_terms=stated), lr=0.1)
    for _ in range(3):
        model.zero_grad()
        model(numbers(BATCH, TOKENS, WIDTH)).square().mean().backward()
        kfac.step()
    (said,) = [str(each.message) for each in recwarn]
    assert "the number of loss terms is guessed" in said
    assert "kfac.set_loss_terms(n)" in said


def test_a_model_that_returns_losses_alone_leaves_a_guess(recwarn):
    model = Reshaped(OUTPUTS, lambda y: {"loss": y.square().mean()})
    kfac = KFAC(model, KFACConfig.sc20(**NOW), lr=0.1)
    model(numbers(BATCH, TOKENS, WIDTH))["loss"].backward()
    kfac.step()
    (said,) = [str(each.message) for each in recwarn]
    assert "guessed, as each layer's own examples: the model returns no tensor of scores" in said


def test_a_count_that_is_stated_is_no_guess(recwarn):
    model = Reshaped(OUTPUTS, lambda y: y.mT)
    kfac, seen = KFAC(model, KFACConfig.sc20(**NOW), lr=0.1), watched(model)
    kfac.set_loss_terms(BATCH * TOKENS)
    entropy(model(numbers(BATCH, TOKENS, WIDTH))).backward()
    kfac.step()
    assert_counts(kfac, seen, "trunk", BATCH * TOKENS)
    assert len(recwarn) == 0


def in_training_mode(model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        model(x)


def in_eval_mode(model: nn.Module, x: Tensor) -> None:
    model.eval()
    in_training_mode(model, x)
    model.train()


class Checkpointed(Words):
    """The trunk is computed again in the backward pass."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(self.trunk, x, use_reentrant=self.reentrant)
        return self.head(hidden.tanh())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # of the other pass
@pytest.mark.parametrize(
    ("kind", "other"),
    [
        ("plain", in_training_mode), ("plain", in_eval_mode), ("checkpoint", in_training_mode),
        ("reentrant checkpoint", in_training_mode),
    ],
)  # fmt: skip
def test_a_pass_without_gradients_between_forward_and_backward_changes_no_count(kind, other):
    model = (Words if kind == "plain" else Checkpointed)(nn.Linear(5, OUTPUTS), flat=False)
    model.reentrant = kind.startswith("reentrant")
    kfac, seen = KFAC(model, KFACConfig.sc20(**NOW), lr=0.1), watched(model)
    loss = squares(model(numbers(BATCH, TOKENS, WIDTH).requires_grad_()))
    other(model, numbers(30 * BATCH, 2 * TOKENS, WIDTH))
    loss.backward()
    kfac.step()
    for layer in ("trunk", "head"):
        assert_counts(kfac, seen, layer, BATCH * TOKENS)


def test_a_model_that_is_one_reentrant_checkpoint_counts_as_without_it():
    model = Words(nn.Linear(5, OUTPUTS), flat=False)
    kfac, seen = KFAC(model, KFACConfig.sc20(**NOW), lr=0.1), watched(model)
    x = numbers(BATCH, TOKENS, WIDTH).requires_grad_()
    squares(checkpoint(model, x, use_reentrant=True)).backward()
    kfac.step()
    for layer in ("trunk", "head"):
        assert_counts(kfac, seen, layer, BATCH * TOKENS)


class Places(nn.Module):
    """Words at places, whose embedding does not see the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.trunk, self.head = (
            nn.Embedding(TOKENS, WIDTH),
            nn.Linear(WIDTH, 5),
            nn.Linear(5, OUTPUTS),
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x + self.places(torch.arange(TOKENS))).tanh())


def factors_of(rank: int, world_size: int, strategy: str, execution: Execution, empty: bool) -> dict:
    """Factors after a step in which only rank 0 has examples, or with `empty` none has."""
    torch.manual_seed(0)
    model = Places()
    x = numbers(BATCH, TOKENS, WIDTH)
    options = {**NOW, "strategy": strategy}
    kfac = KFAC(model, KFACConfig.sc20(**options), lr=0.1, execution=execution)
    output = model(x[: 0 if rank or empty else BATCH])
    (output.square().sum(-1).sum() / max(1, output[..., 0].numel())).backward()
    kfac.step()
    return {
        (kfac.shapes[layer].name, kind): factor.clone()
        for (layer, kind), factor in kfac._factors.running.items()
    }


@pytest.mark.parametrize(
    ("strategy", "execution"),
    [
        ("comm_opt", Execution.SEQUENTIAL), ("mem_opt", Execution.BATCHED), ("d_kfac", Execution.SEQUENTIAL)
    ],
)  # fmt: skip
def test_a_rank_without_examples_adds_nothing(world, strategy, execution):
    want = factors_of(0, 1, "comm_opt", execution, False)
    checked = set()
    for factors in world(2).run(factors_of, strategy, execution, False):
        for key, factor in factors.items():
            torch.testing.assert_close(factor, want[key], rtol=1e-10, atol=1e-14)
            checked.add(key)
    assert checked == set(want)


@pytest.mark.parametrize(("world_size", "execution"), [(1, Execution.BATCHED), (2, Execution.SEQUENTIAL)])
def test_a_step_in_which_no_rank_has_examples_keeps_the_factors(world, world_size, execution):
    for factors in world(world_size).run(factors_of, "comm_opt", execution, True):
        for (name, kind), factor in factors.items():
            eye = torch.eye(factor.shape[-1], dtype=factor.dtype).expand_as(factor)
            assert torch.equal(factor, eye), (name, kind)


@pytest.mark.filterwarnings("ignore:K-FAC. no statistics")
@pytest.mark.parametrize("execution", Execution)
def test_no_loss_terms_by_statement_keep_the_factors(execution):
    model = Words(nn.Linear(5, OUTPUTS), flat=False)
    kfac = KFAC(model, KFACConfig.sc20(**NOW), lr=0.1, execution=execution)
    kfac.set_loss_terms(0)
    (model(numbers(BATCH, TOKENS, WIDTH)) * 0).sum().backward()
    kfac.step()
    for factor in kfac._factors.running.values():
        assert torch.equal(factor[0], torch.eye(factor.shape[-1], dtype=factor.dtype))


def test_a_statement_is_forgotten_also_by_a_step_that_updates_no_factor():
    model = Words(nn.Linear(5, OUTPUTS), flat=False)
    config = KFACConfig.sc20(factor_decay=0.0, factor_update_steps=3, inverse_update_steps=3)
    kfac, seen = KFAC(model, config, lr=0.1), watched(model)
    for step in range(4):
        if step == 1:
            kfac.set_loss_terms(torch.tensor(1000))
        model.zero_grad()
        squares(model(numbers(BATCH, TOKENS, WIDTH))).backward()
        kfac.step()
    for layer in ("trunk", "head"):
        assert_counts(kfac, seen, layer, BATCH * TOKENS)


@pytest.mark.parametrize("count", [-1, float("inf"), "24", True])
def test_a_statement_that_is_no_number_of_terms_is_refused(count):
    kfac = KFAC(Words(nn.Linear(5, OUTPUTS), flat=False), KFACConfig.sc20(**NOW), lr=0.1)
    with pytest.raises(ConfigError, match=r"must be a finite number of loss terms >= 0"):
        kfac.set_loss_terms(count)
    with pytest.raises(ConfigError, match=r"set_loss_terms: .* must be a finite number"):
        kfac.set_loss_terms(1, {"head": count})
