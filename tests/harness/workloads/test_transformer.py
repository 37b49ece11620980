"""Promise: the Transformer sees neither padding nor later words; K-FAC sees all its projections."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from harness.workloads import WORKLOADS
from harness.workloads.models.language import Attention, Transformer, sinusoids, translate
from harness.workloads.translation.multi30k import bleu
from kfac_core.config import KFACConfig
from kfac_core.layers import find_layers
from tests.harness.workloads.sentences import (
    BEGIN,
    END,
    PAD,
    independently,
    options,
    translation,
    write_pairs,
)
from tests.harness.workloads.texts import WORDS, share

SKIP = ("source_embedding", "target_embedding", "head")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Transformer(options("nowhere"), PAD).double().eval()


def drawn(*shape):
    return torch.randint(3, 43, shape, generator=torch.Generator().manual_seed(1))


def test_a_token_sees_no_later_one(model):
    source, shown = drawn(2, 7), drawn(2, 6)
    before = model(source, shown)
    for place in range(6):
        changed = shown.clone()
        changed[:, place] = (changed[:, place] - 2) % 40 + 3
        after = model(source, changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert (after[:, place:] - before[:, place:]).abs().amax(2).min() > 1e-6


def test_padding_changes_no_score_of_a_real_token(model):
    lengths = [(7, 6), (3, 6), (5, 2), (1, 1)]
    source, shown = drawn(4, 7), drawn(4, 6)
    for row, (german, english) in enumerate(lengths):
        source[row, german:] = PAD
        shown[row, english:] = PAD
    padded = model(source, shown)
    for row, (german, english) in enumerate(lengths):
        alone = model(source[row : row + 1, :german], shown[row : row + 1, :english])
        assert torch.allclose(padded[row, :english], alone[0], rtol=1e-10, atol=1e-12)


def test_gradients_at_padding_are_zero(model):
    """So that K-FAC's G has none of it."""
    source, shown = drawn(2, 7), drawn(2, 6)
    source[1, 4:], shown[1, 3:] = PAD, PAD
    outputs = {}
    for layer in find_layers(model, KFACConfig.sc20(skip=SKIP)):
        layer.module.register_forward_hook(
            lambda module, args, output, name=layer.name: outputs.update({name: output})
        )
    scores = model(source, shown)
    for output in outputs.values():
        output.retain_grad()
    scores[0].logsumexp(1).sum().add(scores[1, :3].logsumexp(1).sum()).backward()
    assert len(outputs) == 32
    for name, output in outputs.items():
        real = 4 if output.shape[1] == 7 else 3
        assert output.grad[1, :real].abs().sum() > 0, name
        assert not output.grad[1, real:].any(), name


def test_attention_is_that_of_the_paper():
    """Vaswani et al. 2017, equation 1, head by head."""
    torch.manual_seed(0)
    attention = Attention(12, 3, 0.0).double()
    asking, asked = torch.randn(2, 5, 12).double(), torch.randn(2, 4, 12).double()
    real = torch.tensor([[True, True, True, True], [True, True, False, False]])
    heads = []
    for head in range(3):
        rows = slice(4 * head, 4 * head + 4)
        query, key, value = (
            part @ projection.weight[rows].T
            for part, projection in (
                (asking, attention.query), (asked, attention.key), (asked, attention.value),
            )
        )  # fmt: skip
        scores = (query @ key.transpose(1, 2) / math.sqrt(4)).masked_fill(~real[:, None], -math.inf)
        heads.append(scores.softmax(2) @ value)
    by_hand = torch.cat(heads, 2) @ attention.out.weight.T
    assert torch.allclose(attention(asking, asked, real[:, None, None]), by_hand, rtol=1e-10)


def test_positions_are_those_of_the_paper():
    table = sinusoids(20, 16, torch.device("cpu"))
    for place, pair in ((0, 0), (1, 0), (7, 3), (19, 7)):
        angle = place / 10_000 ** (2 * pair / 16)
        assert table[place, 2 * pair].item() == pytest.approx(math.sin(angle), abs=1e-5)
        assert table[place, 2 * pair + 1].item() == pytest.approx(math.cos(angle), abs=1e-5)
    assert sinusoids(3, 7, torch.device("cpu")).shape == (3, 7)


def test_kfac_takes_every_projection_and_as_published_neither_embeddings_nor_head():
    for tied in (True, False):
        model = Transformer(options("nowhere", layers=3, tied=tied), PAD)
        taken = {layer.name for layer in find_layers(model, KFACConfig.sc20(skip=SKIP))}
        plain = {
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name.startswith(("encoder", "decoder"))
        }
        assert taken == plain
        assert len(taken) == 3 * (4 + 2) + 3 * (8 + 2)
        every = {layer.name for layer in find_layers(model, KFACConfig.sc20())}
        # a weight that embeds and scores words is one layer, in the embedding's place
        assert every - taken == set(SKIP) - ({"head"} if tied else set())
        assert (model.head.weight is model.target_embedding.weight) == tied


def test_by_default_it_has_the_size_of_the_papers_base_model():
    """65 million (Vaswani et al. 2017, table 3) with 37,000 tokens and one embedding for both languages."""
    with torch.device("meta"):
        model = Transformer({**WORKLOADS["multi30k"].options, "vocabulary": 37_000}, PAD)
    count = sum(p.numel() for p in model.parameters()) - 37_000 * 512
    assert count / 1e6 == pytest.approx(65, rel=0.04)


def test_greedy_decoding_takes_the_likeliest_token_of_each_sentence_alone(model):
    source = drawn(5, 7)
    for row, length in enumerate((7, 3, 5, 1, 6)):
        source[row, length:] = PAD
    most = torch.tensor([9, 4, 12, 1, 8])
    with torch.no_grad():  # an end that comes at different times
        model.target_embedding.weight[END] = 1.5 * model.target_embedding.weight[20]
    said = translate(model, source, most, BEGIN, END)
    for row, limit in enumerate(most.tolist()):
        alone = [BEGIN]
        real = source[row : row + 1, : int((source[row] != PAD).sum())]
        while alone[-1] != END and len(alone) <= limit:
            alone.append(int(model(real, torch.tensor([alone]))[0, -1].argmax()))
        assert said[row] == [token for token in alone[1:] if token != END]
    assert len({len(ids) for ids in said}) > 1


@pytest.mark.slow
@torch.no_grad()
def test_bleu_is_that_of_the_whole_held_out_text_in_any_world(tmp_path):
    sacrebleu = pytest.importorskip("sacrebleu")
    write_pairs(tmp_path)
    torch.manual_seed(0)
    mine = translation(tmp_path, bleu=True)
    model = mine.model().eval()
    held_out = independently(tmp_path, "val")

    def most(german):
        return torch.tensor([len(german) + 50])

    said = [
        " ".join(WORDS[token - 3] for token in ids if token > 2)
        for german, _ in held_out
        for ids in translate(model, torch.tensor([[*german, END]]), most(german), BEGIN, END)
    ]
    english = [" ".join(WORDS[token - 3] for token in ids) for _, ids in held_out]
    wanted = sacrebleu.corpus_bleu(said, [english]).score
    for world_size in (1, 3):
        ranks = [translation(tmp_path, share(rank, world_size), bleu=True) for rank in range(world_size)]
        plain = [rank.evaluate(model) for rank in ranks]
        assert sum(count for _, count in plain) == sum(len(ids) + 1 for _, ids in held_out)
        score = ranks[0].score([rank.findings() for rank in ranks])
        assert score == {"bleu": pytest.approx(wanted, rel=1e-9)}
    assert 0 < wanted < 100
    assert bleu(english, english) == pytest.approx(100)
