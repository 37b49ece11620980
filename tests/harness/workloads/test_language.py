"""Promise: language batches are the tokens of any number of texts; what cannot serve is one line."""

from __future__ import annotations

import gzip
import lzma
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from harness.errors import DataError
from harness.workloads import WORKLOADS
from harness.workloads.language import BERT_SPECIALS
from harness.workloads.language.corpus import find_text, read_corpus
from harness.workloads.language.language import Bert, Gpt
from harness.workloads.models.language import bert, gpt2, with_linear_projections
from harness.workloads.sources.tokenizer import read_tokenizer, train_tokenizer
from kfac_core.config import KFACConfig
from kfac_core.layers import find_layers
from tests.harness.workloads.texts import (
    SMALL,
    WORDS,
    independently,
    options,
    share,
    write_texts,
    write_tokenizer,
)

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


def test_a_text_that_changed_is_read_anew(tmp_path):
    write_texts(tmp_path)
    before = workload("gpt", tmp_path)._corpus.train.tokens.tolist()
    path = tmp_path / "train.txt"
    path.write_text(path.read_text() + "w1 w2\n")
    assert workload("gpt", tmp_path)._corpus.train.tokens.tolist() == [*before, 6, 7]


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
    taken = {layer.name for layer in find_layers(model, KFACConfig.sc20(skip=PUBLISHED_SKIP[name]))}
    assert len(taken) == 3 * count
    body = {"bert": "bert.encoder", "gpt": "transformer.h"}[name]
    assert taken == {
        f"{body}.{inside}"
        for inside, module in model.get_submodule(body).named_modules()
        if isinstance(module, nn.Linear)
    }
    untied = {"bert": bert, "gpt": gpt2}[name]({**sizes, "tied": False})
    every = {layer.name for layer in find_layers(untied, KFACConfig.sc20())}
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


def test_ranks_drop_different_units_and_start_from_the_same_weights(folder):
    drops, weights = [], []
    for rank in range(2):
        torch.manual_seed(3)
        model = workload("gpt", folder, share(rank, 2), dropout=0.5).model()
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        drops.append(nn.functional.dropout(torch.ones(64)))
    assert torch.equal(*weights)
    assert not np.array_equal(drops[0], drops[1])


PUBLISHED = "w1 w2\nw3\n\n  \nw4 w5 w6\n\nw7\n"  # a sentence a line, documents with empty lines between
WIKITEXT = " = w1 = \n\n w2 w3\n \n = = w4 = = \n \n w5\n = w6 w7 = \n \n w8 = w9\n"


def read(folder: Path, text: str = "part-*.txt", **changes: object):
    asked = options("bert", folder, train_text=text, sequence_length=5, **changes)
    return read_corpus(asked, (), 2, 2).train


@pytest.fixture
def parts(tmp_path):
    write_texts(tmp_path)
    (tmp_path / "part-0.txt").write_text(PUBLISHED)
    (tmp_path / "part-1.txt").write_text("w8 w9\nw10\n")
    return tmp_path


def test_files_follow_each_other_and_empty_lines_or_a_new_file_begin_a_document(parts):
    found = read(parts)
    assert found.tokens.tolist() == [5 + number for number in range(1, 11)]
    assert found.lines.tolist() == [0, 2, 3, 6, 7, 9]
    assert found.documents.tolist() == [0, 3, 6, 7]
    other_way = read(parts, "part-1.txt, part-0.txt")
    assert other_way.tokens.tolist()[:3] == [13, 14, 15]
    assert other_way.documents.tolist() == [0, 3, 6, 9]


def test_titles_begin_the_documents_of_wikitext_and_headings_of_sections_do_not(parts):
    (parts / "wiki.txt").write_text(WIKITEXT)
    (parts / "words.json").write_text((parts / "words.json").read_text().replace('"w39": 44', '"=": 44'))
    found = read(parts, "wiki.txt", documents="titles")
    assert found.lines.tolist() == [0, 3, 5, 10, 11, 15]
    assert found.documents.tolist() == [0, 11]
    assert read(parts, "wiki.txt").documents.tolist() == [0, 3, 5, 10, 15]


def test_compressed_files_hold_the_same_text(parts):
    plain = read(parts).tokens.tolist()
    (parts / "zip-0.txt.gz").write_bytes(gzip.compress(PUBLISHED.encode()))
    (parts / "zip-1.txt.xz").write_bytes(lzma.compress((parts / "part-1.txt").read_bytes()))
    assert read(parts, "zip-*").tokens.tolist() == plain


def test_lines_are_streamed(tmp_path):
    """The first line of an endless file is there before its end."""
    (tmp_path / "a.txt").write_text("w1\n" * 50_000)
    lines = find_text(options("bert", tmp_path, train_text="a.txt"), "train_text").lines()
    assert next(lines).text == "w1\n"
    (tmp_path / "a.txt").write_text("w2\n")  # the rest was not read yet
    assert sum(1 for _ in lines) < 49_999


FAULTS = {
    "no match": ("none-*.txt", None, "/none-*.txt does not exist; put a text file there, name it in"),
    "one is missing": ("part-0.txt,gone.txt", None, "/gone.txt does not exist; put a text file there"),
    "named twice": ("part-*.txt,part-1.txt", None, "part-1.txt is named twice in workload.options"),
    "no name": (" , ", None, "workload.options.train_text=' , ' names no file; name one or more"),
    "one is empty": ("part-*.txt", ("part-2.txt", b"\n \n"), "part-2.txt must have at least one line of"),
    "one is no text": ("part-*.txt", ("part-2.txt", b"\xff\xfe\x00"), "part-2.txt must be UTF-8 text"),
    "a cut archive": (
        "x.gz", ("x.gz", gzip.compress(b"w1 w2\n" * 900)[:-9]),
        "x.gz cannot be read: Compressed file ended before the end-of-stream marker was reached",
    ),
    "a damaged archive": (
        "x.gz", ("x.gz", gzip.compress(b"w1 " * 99)[:-8] + b"\1" * 8), "x.gz cannot be read: CRC",
    ),
    "no archive": (
        "x.xz", ("x.xz", b"w1 w2\n"), "x.xz cannot be read: Input format not supported by decoder",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_cannot_serve_is_one_line(parts, fault):
    named, spoilt, message = FAULTS[fault]
    if spoilt is not None:
        (parts / spoilt[0]).write_bytes(spoilt[1])
    with pytest.raises(DataError) as raised:
        read(parts, named)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


WITHOUT_MASK = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]


UNFIT = {
    "no text": (
        lambda folder: (folder / "train.txt").unlink(), {},
        "/train.txt does not exist; put a text file there, name it in workload.options.train_text, or",
    ),
    "an empty text": (
        lambda folder: (folder / "train.txt").write_text(""), {}, "train.txt must have at least one line",
    ),
    "no tokenizer": (
        lambda folder: (folder / "words.json").unlink(), {},
        "/words.json does not exist; name a tokenizer.json in workload.options.tokenizer, or omit the option",
    ),
    "a broken tokenizer": (
        lambda folder: (folder / "words.json").write_text('{"version": "1.0", "model"'), {},
        "/words.json is not a tokenizer.json that the library tokenizers reads (",
    ),
    "another tokenizer": (
        lambda folder: write_tokenizer(folder / "words.json", WITHOUT_MASK), {},
        "/words.json must have the tokens [PAD], [UNK], [CLS], [SEP], [MASK], but has no [MASK]; use another",
    ),
    "too small a vocabulary": (
        lambda folder: None, {"vocabulary": 44},
        "/words.json has ids up to 44, but workload.options.vocabulary=44; use a vocabulary of at least 45",
    ),
    "too short a text": (
        lambda folder: None, {"sequence_length": 400},
        "/test.txt has 300 tokens, fewer than the 398 of one sequence; use a longer text, or a smaller "
        "workload.options.sequence_length",
    ),
    "fewer sequences than asked for": (
        lambda folder: None, {"train_examples": 1000},
        "/train.txt must have 1000 sequences, got 162; complete them, or set workload.options.train_ex",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", UNFIT)
def test_a_text_or_tokenizer_that_cannot_serve_is_one_line(fault, tmp_path):
    spoil, changes, message = UNFIT[fault]
    write_texts(tmp_path)
    spoil(tmp_path)
    with pytest.raises(DataError) as raised:
        Bert(options("bert", tmp_path, **changes), share())
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_batch_beyond_the_text_is_one_line(tmp_path):
    write_texts(tmp_path, train=100)
    with pytest.raises(DataError, match=r"has 9 sequences, fewer than one global batch of 12; use a longer"):
        Gpt(options("gpt", tmp_path), share())


def test_a_cache_that_cannot_be_written_names_the_way_out(tmp_path, monkeypatch):
    write_texts(tmp_path)
    monkeypatch.setenv("KRONSCALE_CACHE", str(tmp_path / "train.txt" / "below"))
    with pytest.raises(
        DataError, match=r"token ids could not be written to .*Not a directory.*KRONSCALE_CACHE"
    ):
        Gpt(options("gpt", tmp_path), share())
