"""Promise: language batches are the text's tokens; each comes once an epoch, in any world, resumed."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from harness.workloads import WORKLOADS
from harness.workloads.language import BERT_SPECIALS
from harness.workloads.language.corpus import read_corpus
from harness.workloads.language.language import Bert, Gpt
from harness.workloads.models.language import bert, gpt2, with_linear_projections
from harness.workloads.sources.tokenizer import read_tokenizer, train_tokenizer
from kfac_core.config import KFACConfig
from kfac_core.layers import find_layers
from tests.harness.workloads.texts import SMALL, independently, options, share, write_texts

BUILD = {"bert": Bert, "gpt": Gpt}
PUBLISHED_SKIP = {"bert": ("bert.embeddings", "cls"), "gpt": ("transformer.wpe", "lm_head")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("texts")
    write_texts(made)
    return made


def workload(name, folder, mine=None, **changes):
    return BUILD[name](options(name, folder, **changes), mine or share())


def epoch(name, folder, world_size=1, number=0, seed=3, first=0):
    """Global batches of an epoch, put together from all ranks."""
    ranks = [
        list(workload(name, folder, share(rank, world_size, seed=seed)).batches(number, first))
        for rank in range(world_size)
    ]
    return [
        tuple(torch.cat(columns) for columns in zip(*parts, strict=True))
        for parts in zip(*ranks, strict=True)
    ]


def sequences(name, batches):
    """The text's own tokens of every sequence: holes filled, ends off."""
    found = []
    for batch in batches:
        if name == "gpt":
            found += [
                (*shown, int(wanted[-1])) for shown, wanted in zip(batch[0].tolist(), batch[1], strict=True)
            ]
            continue
        shown, places, wanted = batch
        assert (shown[:, 0] == 2).all()  # [CLS]
        assert (shown[:, -1] == 3).all()  # [SEP]
        found += [tuple(row) for row in shown.scatter(1, places, wanted)[:, 1:-1].tolist()]
    return found


@pytest.mark.parametrize("name", BUILD)
def test_batches_hold_the_tokens_of_the_text(folder, name):
    ids = independently(folder / "train.txt")
    length, stride = (8, 8) if name == "bert" else (11, 10)
    cut = [tuple(ids[start : start + length]) for start in range(0, len(ids) - length + 1, stride)]
    seen = sequences(name, epoch(name, folder))
    assert len(seen) == len(cut) // 12 * 12
    assert set(seen) <= set(cut)
    assert len(set(seen)) == len(seen)


def test_the_next_token_is_asked_for_everywhere(folder):
    shown, wanted = next(workload("gpt", folder).batches(0))
    assert shown.shape == wanted.shape == (12, 10)
    assert torch.equal(shown[:, 1:], wanted[:, :-1])


def test_a_trained_tokenizer_says_the_text_again_and_lines_stand_alone(token_cache):
    read = options("gpt", "embedded", tokenizer="", vocabulary=300)
    corpus = read_corpus(read, (), 11, 10)
    tokenizer = read_tokenizer(Path(corpus.test.tokens.filename).parent / "tokenizer.json")
    lines = [line.strip() + "\n" for line in embedded("test").splitlines() if line.strip()]
    assert tokenizer.decode(corpus.test.tokens.tolist()) == "".join(lines)
    one_by_one = [index for line in lines for index in tokenizer.encode(line).ids]
    assert corpus.test.tokens.tolist() == one_by_one
    assert max(one_by_one) < 300


@cache
def embedded(split):
    import lzma

    return lzma.open(f"harness/workloads/embedded/wikitext-2/{split}.txt.xz", "rt", encoding="utf-8").read()


def test_nothing_held_out_is_in_the_training_text():
    train = {line.strip() for line in embedded("train").splitlines() if len(line) > 40}
    assert not train & {line.strip() for line in embedded("test").splitlines()}


TRAIN = """\
import hashlib
from tests.harness.workloads.test_language import embedded
from harness.workloads.sources.tokenizer import train_tokenizer
text = train_tokenizer(embedded("test").splitlines(), 400, ("[MASK]",)).to_str()
print(hashlib.sha256(text.encode()).hexdigest())
"""


@pytest.mark.ranks
def test_the_same_text_trains_the_same_tokenizer_in_any_process():
    sums = {
        subprocess.run(
            [sys.executable, "-c", TRAIN],
            env={**os.environ, "RAYON_NUM_THREADS": str(threads)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for threads in (1, 2)
    }
    assert len(sums) == 1
    tokenizer = train_tokenizer(embedded("test").splitlines(), 400, BERT_SPECIALS)
    assert [tokenizer.id_to_token(index) for index in range(5)] == list(BERT_SPECIALS)


START = """\
import sys
from tests.harness.workloads.texts import options
from harness.workloads.language.corpus import read_corpus
asked = options("gpt", "embedded", tokenizer="", vocabulary=320)
print(int(read_corpus(asked, (), 11, 10).train.tokens.astype("int64").sum()))
"""


@pytest.mark.ranks
def test_of_ranks_that_start_at_once_one_prepares_and_all_read_the_same(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", START],
            env={**os.environ, "KRONSCALE_CACHE": str(tmp_path / "new" / "cache")},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    said = {rank.communicate(timeout=120)[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert len(said) == 1
    left = sorted(path.name.partition("-")[0] for path in (tmp_path / "new" / "cache").iterdir())
    assert left == [".text", "text"]  # a lock, and one folder


def test_a_text_that_changed_is_read_anew(tmp_path):
    write_texts(tmp_path)
    before = workload("gpt", tmp_path)._corpus.train.tokens.tolist()
    path = tmp_path / "train.txt"
    path.write_text(path.read_text() + "w1 w2\n")
    assert workload("gpt", tmp_path)._corpus.train.tokens.tolist() == [*before, 6, 7]


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_sequence_comes_once_an_epoch_in_the_same_global_batches(folder, name, world_size):
    alone, together = epoch(name, folder), epoch(name, folder, world_size)
    assert len(alone) == workload(name, folder).steps_per_epoch > 8
    for one, many in zip(alone, together, strict=True):  # with the same holes
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, many, strict=True))
    seen = sequences(name, together)
    assert len(set(seen)) == len(seen) == 12 * len(alone)


@pytest.mark.parametrize("name", BUILD)
@pytest.mark.parametrize("first", [1, 5])
def test_a_resumed_epoch_goes_on_where_it_was_left(folder, name, first):
    whole, rest = epoch(name, folder, 2), epoch(name, folder, 2, first=first)
    assert len(rest) == len(whole) - first
    for one, other in zip(whole[first:], rest, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


@pytest.mark.parametrize("name", BUILD)
def test_epochs_and_seeds_differ_and_repeat_themselves(folder, name):
    def first(number, seed):
        return epoch(name, folder, 1, number, seed)[0][0]

    assert torch.equal(first(4, 3), first(4, 3))
    assert not torch.equal(first(4, 3), first(5, 3))
    assert not torch.equal(first(4, 3), first(4, 2))


@torch.no_grad()
@pytest.mark.parametrize("name", BUILD)
def test_held_out_text_is_shared_among_ranks_and_masked_the_same_for_every_seed(folder, name):
    torch.manual_seed(0)
    model = workload(name, folder).model().eval()
    alone, count = workload(name, folder).evaluate(model)
    totals = {"accuracy": 0.0, "loss": 0.0}
    counted = 0
    for rank in range(3):
        sums, part = workload(name, folder, share(rank, 3, seed=8)).evaluate(model)
        totals = {metric: totals[metric] + value for metric, value in sums.items()}
        counted += part
    length = len(independently(folder / "test.txt"))
    assert counted == count == ((length // 8) * 1 if name == "bert" else ((length - 11) // 10 + 1) * 10)
    assert totals["accuracy"] == alone["accuracy"]
    assert totals["loss"] == pytest.approx(alone["loss"], rel=1e-5)


@pytest.mark.parametrize("name", BUILD)
def test_the_loss_is_the_mean_cross_entropy_of_what_is_asked(folder, name):
    mine = workload(name, folder)
    model, batch = mine.model(), next(mine.batches(0))
    if name == "bert":  # by the model's own way to its scores, for all places
        shown, places, wanted = batch
        scores = model(input_ids=shown).logits
        logs = scores.log_softmax(2).gather(1, places.unsqueeze(2).expand(-1, -1, scores.shape[2]))
    else:
        shown, wanted = batch
        logs = model(input_ids=shown).logits.log_softmax(2)
    by_hand = -logs.gather(2, wanted.unsqueeze(2)).mean()
    assert mine.loss(model, batch).item() == pytest.approx(by_hand.item(), rel=1e-5)


def test_linear_layers_in_the_place_of_conv1d_compute_the_same():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 9, "vocab_size": 31}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)
    theirs = GPT2LMHeadModel(config).double().eval()
    state = {name: value.clone() for name, value in theirs.state_dict().items()}
    tokens = torch.randint(0, 31, (4, 9))
    wanted = theirs(input_ids=tokens).logits
    wanted.square().mean().backward()
    gradient = theirs.get_submodule("transformer.h.1.attn.c_attn").weight.grad.clone()
    theirs.zero_grad()
    ours = with_linear_projections(theirs)
    got = ours(input_ids=tokens).logits
    got.square().mean().backward()
    layer = ours.get_submodule("transformer.h.1.attn.c_attn")
    assert torch.equal(layer.weight, state["transformer.h.1.attn.c_attn.weight"].T)
    assert torch.allclose(got, wanted, rtol=1e-12, atol=1e-13)
    assert torch.allclose(layer.weight.grad, gradient.T, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("name", "count"), [("bert", 6), ("gpt", 4)])
def test_kfac_takes_every_projection_and_as_published_neither_embeddings_nor_head(name, count):
    sizes = {**WORKLOADS[name].options, **SMALL, "layers": 3, "vocabulary": 50, "sequence_length": 10}
    model = {"bert": bert, "gpt": gpt2}[name](sizes)
    taken = {layer.name for layer in find_layers(model, KFACConfig(skip=PUBLISHED_SKIP[name]))}
    assert len(taken) == 3 * count
    body = {"bert": "bert.encoder", "gpt": "transformer.h"}[name]
    assert taken == {
        f"{body}.{inside}"
        for inside, module in model.get_submodule(body).named_modules()
        if isinstance(module, nn.Linear)
    }
    untied = {"bert": bert, "gpt": gpt2}[name]({**sizes, "tied": False})
    every = {layer.name for layer in find_layers(untied, KFACConfig())}
    plain = [module for module in untied.modules() if isinstance(module, nn.Linear | nn.Embedding)]
    assert len(every) == len(plain) == 3 * count + (5 if name == "bert" else 3)
    assert all(parameter.requires_grad for parameter in untied.parameters())


@pytest.mark.parametrize(
    ("name", "millions"),
    # Devlin et al. 2019, section 3: 110 and 340 million with a pooler; Radford et al. 2019: 124 (as released)
    [("bert", 109.5), ("gpt", 124.4)],
)
def test_the_defaults_are_the_published_base_models(name, millions):
    with torch.device("meta"):
        sizes = {**WORKLOADS[name].options, "sequence_length": {"bert": 512, "gpt": 1024}[name]}
        model = {"bert": bert, "gpt": gpt2}[name](sizes)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.001)


@pytest.mark.parametrize("name", BUILD)
def test_synthetic_text_has_the_size_of_the_real_one_and_needs_no_file(name):
    asked = options(name, "synthetic", tokenizer="", train_examples=50, test_examples=7)
    mine = BUILD[name](asked, share())
    shown, *_ = next(mine.batches(0))
    assert (shown.shape, mine.steps_per_epoch) == ((12, 10), 4)
    assert int(shown.max()) < 45
    with torch.no_grad():
        assert mine.evaluate(mine.model())[1] == 7 * (1 if name == "bert" else 10)


def test_perplexity_is_e_to_the_mean_loss():
    description = WORKLOADS["gpt"]
    assert description.value("perplexity", {"loss": 2.0, "accuracy": 0.5}) == pytest.approx(math.e**2)
    assert description.value("accuracy", {"loss": 2.0, "accuracy": 0.5}) == 0.5
    assert math.isnan(description.value("perplexity", {"loss": math.nan}))
    assert math.isfinite(description.value("perplexity", {"loss": 1e6}))


def test_ranks_drop_different_units_and_start_from_the_same_weights(folder):
    drops, weights = [], []
    for rank in range(2):
        torch.manual_seed(3)
        model = workload("gpt", folder, share(rank, 2), dropout=0.5).model()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        drops.append(nn.functional.dropout(torch.ones(64)))
    assert torch.equal(*weights)
    assert not np.array_equal(drops[0], drops[1])
