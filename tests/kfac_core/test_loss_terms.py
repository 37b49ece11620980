"""Promise: A ⊗ G is the Fisher of the loss that is trained, in every layout, and all layers count alike.

References are written from the definition: per-token and per-sequence gradients of autograd, for `expand`
and `reduce` (Eschenhagen et al. 2023).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig
from kfac_core.config import Execution
from kfac_core.errors import ConfigError

BATCH, TOKENS, WIDTH, OUTPUTS = 6, 4, 3, 2
NOW = {"factor_decay": 0.0, "factor_update_steps": 1, "inverse_update_steps": 1}
LAYOUTS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "[B, T, F]": (lambda x: x, 0),
    "[B * T, F]": (lambda x: x.flatten(0, 1), 0),
    "[T, B, F]": (lambda x: x.transpose(0, 1), 1),
    "[B, 2, T / 2, F]": (lambda x: x.unflatten(1, (2, -1)), 0),
}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def numbers(*size: int) -> Tensor:
    return torch.randn(*size, dtype=torch.float64)


def block(kfac: KFAC, layer: str) -> Tensor:
    """A ⊗ G of a layer."""
    index = [shape.name for shape in kfac.shapes].index(layer)
    a, g = (torch.block_diag(*kfac._factors.running[index, kind]) for kind in "ag")
    return torch.kron(a, g)


def stepped(model: nn.Module, loss: Callable[[], Tensor], **options: object) -> KFAC:
    """K-FAC after one step; its factors are those of this step alone."""
    execution = options.pop("execution", None)
    kfac = KFAC(model, KFACConfig.sc20(**NOW, **options), lr=0.1, execution=execution)
    loss().backward()
    kfac.step()
    kfac.remove()
    return kfac


def same(got: Tensor, want: Tensor) -> None:
    assert (got - want).norm() <= 1e-10 * want.norm(), float(got.norm() / want.norm())


def rows(gradients: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
    return gradients.reshape(-1, gradients.shape[-1]), inputs.reshape(-1, inputs.shape[-1])


@pytest.mark.parametrize(("layout", "execution"), zip(LAYOUTS, 2 * [*Execution], strict=True))
def test_a_mean_over_tokens_gives_the_per_token_fisher_in_every_layout(layout, execution):
    arrange, _ = LAYOUTS[layout]
    model = nn.Linear(WIDTH, OUTPUTS, bias=False).double()
    x, y = numbers(BATCH, TOKENS, WIDTH), numbers(BATCH, TOKENS, OUTPUTS)
    kfac = stepped(
        model, lambda: (model(arrange(x)) - arrange(y)).square().sum(-1).mean(), execution=execution
    )
    a, b = x.flatten(0, 1), 2 * (x @ model.weight.T - y).flatten(0, 1)  # of every token's own loss
    count = BATCH * TOKENS
    same(block(kfac, ""), torch.kron(a.T @ a / count, b.T @ b / count).detach())


@pytest.mark.parametrize(
    ("layout", "sequence"),
    [
        ("[B, T, F]", "expand"), ("[B, T, F]", "reduce"), ("[B * T, F]", "reduce"), ("[T, B, F]", "reduce"),
        ("[B, 2, T / 2, F]", "expand"),
    ],
)  # fmt: skip
def test_a_mean_over_sequences_gives_the_per_sequence_fisher_of_the_paper(layout, sequence):
    arrange, batch_dim = LAYOUTS[layout]

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, OUTPUTS, bias=False).double()

        def forward(self, x: Tensor) -> Tensor:
            y = torch.tanh(self.inner(arrange(x)))
            y = y.transpose(0, 1) if batch_dim else y
            return y.reshape(BATCH, TOKENS, OUTPUTS).mean(1)

    model = Pooled()
    x, y = numbers(BATCH, TOKENS, WIDTH), numbers(BATCH, OUTPUTS)
    kfac = stepped(model, lambda: (model(x) - y).square().sum(1).mean(), sequence=sequence)
    hidden = torch.tanh(x @ model.inner.weight.T).detach()
    b = (2 * (hidden.mean(1) - y))[:, None] * (1 - hidden**2) / TOKENS  # of every sequence's own loss
    if sequence == "reduce":
        a, b = x.mean(1), b.sum(1)
        want = torch.kron(a.T @ a / BATCH, b.T @ b / BATCH)
    else:
        a, b = x.flatten(0, 1), b.flatten(0, 1)
        want = torch.kron(a.T @ a / (BATCH * TOKENS), b.T @ b / BATCH)
    same(block(kfac, "inner"), want)


class Windows(nn.Module):
    """As in Swin: one layer on the sequence, one on windows of it, side by side in the batch dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.window = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
        self.head = nn.Linear(WIDTH, OUTPUTS).double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.whole(x))
        x = torch.tanh(self.window(x.reshape(-1, 2, WIDTH))).reshape(len(x), TOKENS, WIDTH)
        return self.head(x.mean(1))


@pytest.mark.parametrize("sequence", ["expand", "reduce"])
def test_layers_on_windows_count_the_same_loss_terms_as_layers_on_sequences(sequence):
    model, seen = Windows(), dict[str, tuple[Tensor, Tensor]]()
    x, y = numbers(BATCH, TOKENS, WIDTH), numbers(BATCH, OUTPUTS)
    watch(model, seen)
    kfac = stepped(model, lambda: (model(x) - y).square().sum(1).mean(), sequence=sequence)
    for name in ("whole", "window"):
        a, g = (part.reshape(BATCH, TOKENS, -1) for part in seen[name])
        a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
        if sequence == "reduce":
            a, g = a.mean(1), g.sum(1)
        g, a = rows(g * BATCH, a)
        same(block(kfac, name), torch.kron(a.T @ a, g.T @ g) / (BATCH * len(a)))


def watch(model: nn.Module, seen: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Inputs and gradients of every Linear, by name."""

    def hook(name: str) -> Callable[..., None]:
        def see(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            keep = args[0].detach()
            output.register_hook(lambda g: seen.__setitem__(name, (keep, g)))

        return see

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            module.register_forward_hook(hook(name))


class Experts(nn.Module):
    """A token goes to the expert that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, OUTPUTS, bias=False).double() for _ in range(3))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        out = x.new_zeros(*x.shape[:-1], OUTPUTS)
        for number, layer in enumerate(self.experts):
            out[expert == number] = layer(x[expert == number])
        return out


def expert_blocks(rank: int, world_size: int, strategy: str, execution: Execution) -> dict[str, Tensor]:
    """Blocks of this rank's layers; rank r has r + 1 sequences, and only the last rank's reach expert 2.

    In a second step no rank's tokens reach expert 2, whose factors stay, and expert 1 takes them.
    """
    torch.manual_seed(0)
    model = Experts()
    x, y, expert = expert_data(world_size)
    mine = slice(rank * (rank + 1) // 2, (rank + 1) * (rank + 2) // 2)
    config = KFACConfig.sc20(**NOW, strategy=strategy)
    kfac = KFAC(model, config, lr=0.1, execution=execution)
    found = []
    for reached in (expert, expert.clamp(max=1)):
        (model(x[mine], reached[mine]) - y[mine]).square().sum(-1).mean().backward()
        kfac.step()
        running = kfac._factors.running
        found.append(
            {
                shape.name: torch.kron(running[index, "a"][0], running[index, "g"][0])
                for index, shape in enumerate(kfac.shapes)
                if (index, "a") in running and (index, "g") in running
            }
        )
    first, second = found
    assert all(torch.equal(first[name], second[name]) == (name != "experts.1") for name in first)
    return first


def expert_data(world_size: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    count = world_size * (world_size + 1) // 2
    x = torch.randn(count, 5, WIDTH, dtype=torch.float64, generator=generator)
    y = torch.randn(count, 5, OUTPUTS, dtype=torch.float64, generator=generator)
    expert = torch.randint(0, 2, (count, 5), generator=generator)
    expert[-1, 3:] = 2
    return x, y, expert


@pytest.mark.parametrize(
    ("world_size", "strategy", "execution"),
    [
        (1, "comm_opt", Execution.BATCHED), (2, "mem_opt", Execution.SEQUENTIAL),
        (3, "d_kfac", Execution.BATCHED), (4, "mem_opt", Execution.BATCHED),
    ],
)  # fmt: skip
def test_an_expert_counts_the_worlds_tokens_also_of_ranks_that_it_sees_none_of(
    world, world_size, strategy, execution
):
    torch.manual_seed(0)
    model, (x, y, expert) = Experts(), expert_data(world_size)
    b = (2 * (model(x, expert) - y)).detach()
    checked = set()
    for blocks in world(world_size).run(expert_blocks, strategy, execution):
        for name, got in blocks.items():
            here = expert == int(name.rpartition(".")[2])
            a, g = x[here], b[here]
            share = len(a) / expert.numel()  # of all tokens that the expert sees
            same(got, torch.kron(a.T @ a / len(a), g.T @ g / len(a)) * share)
            checked.add(name)
    assert len(checked) == 3


@pytest.mark.parametrize("shape", [(TOKENS,), (BATCH, TOKENS)])
def test_embeddings_of_positions_count_the_models_tokens_however_positions_are_shaped(shape):
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(TOKENS, WIDTH).double()
            self.head = nn.Linear(WIDTH, OUTPUTS).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(x + self.embedding(torch.arange(TOKENS).expand(shape))))

    model, seen = Positions(), dict[str, tuple[Tensor, Tensor]]()
    x, y = numbers(BATCH, TOKENS, WIDTH), numbers(BATCH, TOKENS, OUTPUTS)
    watch(model, seen)
    kfac = stepped(model, lambda: (model(x) - y).square().sum(-1).mean())
    places, g = seen["embedding"]
    a = functional.one_hot(places.flatten(), TOKENS).double()
    g = g.reshape(-1, WIDTH)
    same(block(kfac, "embedding"), torch.kron(a.T @ a, g.T @ g) * BATCH * TOKENS / len(a))


@pytest.mark.parametrize(
    ("model", "shape", "kind", "count"),
    [
        (nn.Linear(3, 2), (6, 4, 3), "token", 24),
        (nn.Linear(3, 2), (6, 3), "example", 6),
        (nn.Sequential(nn.Conv2d(3, 2, 1), nn.Flatten(), nn.Linear(8, 2)), (6, 3, 2, 2), "example", 6),
    ],
)
def test_what_a_loss_term_is_shows_in_the_log(logged, model, shape, kind, count):
    logged.from_level(logging.INFO)
    stepped(model, lambda: model(torch.randn(shape)).square().mean())
    (message,) = [one for one in logged.messages if "loss terms" in one]
    assert f"loss terms are {kind}s (detected" in message
    assert f" {count} in the first pass" in message


def test_rows_that_belong_to_no_whole_number_of_examples_cannot_be_reduced():
    model = Experts()
    kfac = KFAC(model, KFACConfig.sc20(**NOW, sequence="reduce"), lr=0.1)
    x, _, expert = expert_data(2)
    with pytest.raises(ConfigError, match=r"rows of layer experts.0 cannot be divided among a batch of 3"):
        model(x, expert)
    kfac.remove()


class TwoHeads(nn.Module):
    """A trunk, a score of every token, and one of every sequence, as BERT's."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, 4).double()
        self.words = nn.Linear(4, OUTPUTS).double()
        self.sentences = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return self.words(hidden), self.sentences(hidden[:, 0])


@pytest.mark.parametrize(("execution", "parts"), [(Execution.BATCHED, 1), (Execution.SEQUENTIAL, 3)])
def test_each_head_of_a_sum_of_means_counts_the_terms_of_its_own_mean(execution, parts):
    model = TwoHeads()
    x, y, z = numbers(BATCH, TOKENS, WIDTH), numbers(BATCH, TOKENS, OUTPUTS), numbers(BATCH, 1)
    kfac = KFAC(model, KFACConfig.sc20(**NOW), lr=0.1, execution=execution)
    for part in zip(x.chunk(parts), y.chunk(parts), z.chunk(parts), strict=True):
        kfac.set_loss_terms(part[1][..., 0].numel(), {"sentences": len(part[2])})
        words, sentences = model(part[0])
        loss = (words - part[1]).square().sum(-1).mean() + (sentences - part[2]).square().mean()
        (loss / parts).backward()
    kfac.step()
    kfac.remove()
    fresh = TwoHeads()
    fresh.load_state_dict(model.state_dict())
    hidden = torch.tanh(fresh.trunk(x)).detach()
    inner = fresh.sentences[1](fresh.sentences[0](hidden[:, 0])).detach()
    of_words = 2 * (fresh.words(hidden) - y).detach().flatten(0, 1)  # of every token's own loss
    of_sentences = 2 * (fresh.sentences[2](inner) - z).detach()  # of every sentence's own
    below = of_sentences @ fresh.sentences[2].weight.detach() * (1 - inner**2)
    for layer, a, b in (
        ("words", hidden.flatten(0, 1), of_words),
        ("sentences.0", hidden[:, 0], below),
        ("sentences.2", inner, of_sentences),
    ):
        ones = torch.cat([a, a.new_ones(len(a), 1)], 1)
        same(block(kfac, layer), torch.kron(ones.T @ ones / len(a), b.T @ b / len(a)))


def test_loss_terms_of_a_module_that_is_not_there_are_refused():
    kfac = KFAC(TwoHeads(), KFACConfig.sc20(**NOW), lr=0.1)
    with pytest.raises(ConfigError, match="the model has no module 'pooler'"):
        kfac.set_loss_terms(24, {"pooler": 6})
    kfac.remove()


@pytest.mark.parametrize("stated", [True, False])
def test_the_first_micro_batches_alone_give_the_factors_of_their_own_mean(stated):
    """The others' loss terms are part of the loss, but not of the statistics."""
    model = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, OUTPUTS)).double()
    x, y = numbers(BATCH, TOKENS, WIDTH), numbers(BATCH, TOKENS, OUTPUTS)
    kfac = KFAC(model, KFACConfig.sc20(**NOW), lr=0.1, captured_share=2 / 3)
    for number, part in enumerate(zip(x.chunk(3), y.chunk(3), strict=True)):
        with kfac.paused() if number == 2 else nullcontext():
            if stated:
                kfac.set_loss_terms(part[1][..., 0].numel())
            ((model(part[0]) - part[1]).square().mean() / 3).backward()
    kfac.step()
    kfac.remove()
    first = stepped(model, lambda: (model(x[:4]) - y[:4]).square().mean())
    for name in ("0", "2"):
        same(block(kfac, name), block(first, name))


@pytest.mark.parametrize("batch_dim", [0, 1])
@pytest.mark.parametrize("layer", [nn.Linear(WIDTH, OUTPUTS, bias=False), nn.Embedding(WIDTH, OUTPUTS)])
def test_a_fraction_of_a_batch_keeps_whole_examples_wherever_their_dimension_is(layer, batch_dim):
    model = layer.double()
    ids = torch.randint(WIDTH, (BATCH, TOKENS))
    inputs = ids if isinstance(layer, nn.Embedding) else numbers(BATCH, TOKENS, WIDTH)
    arranged = inputs.transpose(0, 1) if batch_dim else inputs
    options = {"factor_batch_fraction": 0.5, "batch_dim": batch_dim}
    kfac = stepped(model, lambda: model(arranged).square().mean(), **options)
    kept = inputs[: BATCH // 2]
    rows = functional.one_hot(kept, WIDTH).double() if isinstance(layer, nn.Embedding) else kept
    want = rows.reshape(-1, WIDTH).T @ rows.reshape(-1, WIDTH) / (BATCH // 2 * TOKENS)
    a = kfac._factors.running[0, "a"]
    same(a.squeeze(0), want) if a.shape[-1] == WIDTH else same(a.flatten(), want.diagonal())
