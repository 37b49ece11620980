"""Promise: pairs of sentences are shown as written, a step is the same in any world; faults are one line."""

from __future__ import annotations

import gzip
import hashlib
import math
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

from harness.errors import DataError
from harness.workloads import WORKLOADS
from harness.workloads.translation import pairs as sentence_files
from harness.workloads.translation.pairs import PUBLISHED, SOURCE, read_pairs
from tests.harness.workloads.sentences import (
    BEGIN,
    END,
    PAD,
    TRAIN,
    independently,
    options,
    translation,
    write_pairs,
)
from tests.harness.workloads.server import Server
from tests.harness.workloads.texts import WORDS, share, write_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("pairs")
    write_pairs(made)
    return made


def epoch(folder, world_size=1, number=0, seed=3, first=0, **changes):
    """Global batches of an epoch, put together from all ranks: they fit, as all pad to the same length."""
    ranks = [
        list(translation(folder, share(rank, world_size, seed=seed), **changes).batches(number, first))
        for rank in range(world_size)
    ]
    return [
        tuple(torch.cat(columns) for columns in zip(*(part[:3] for part in parts), strict=True))
        for parts in zip(*ranks, strict=True)
    ]


def pairs(batches):
    """The ids of every pair, without marks and padding."""
    found = []
    for source, shown, wanted, *_ in batches:
        for one, given, asked in zip(source.tolist(), shown.tolist(), wanted.tolist(), strict=True):
            german, english = one[: one.index(END)], asked[: asked.index(END)]
            assert set(one[len(german) + 1 :]) <= {PAD}
            assert set(asked[len(english) + 1 :]) <= {-100}
            assert given == [BEGIN, *english, *[PAD] * (len(given) - len(english) - 1)]
            found.append((tuple(german), tuple(english)))
    return found


def test_batches_hold_the_pairs_of_the_files(folder):
    written, seen = independently(folder, "train"), pairs(epoch(folder))
    assert set(seen) <= set(written)
    assert len(set(seen)) == len(seen) == TRAIN // 12 * 12


@torch.no_grad()
def test_pairs_with_a_long_side_are_left_out_of_training_and_kept_for_evaluation(folder):
    short = {pair for pair in independently(folder, "train") if max(map(len, pair)) <= 8}
    assert 24 < len(short) < TRAIN - 24
    seen = pairs(epoch(folder, longest=8))
    assert set(seen) <= short
    assert len(seen) == len(short) // 12 * 12
    mine = translation(folder, longest=8)
    wanted = sum(len(english) + 1 for _, english in independently(folder, "val"))
    assert mine.evaluate(mine.model())[1] == wanted


@torch.no_grad()
def test_so_many_examples_are_the_first_ones(folder):
    assert set(pairs(epoch(folder, train_examples=24))) == set(independently(folder, "train")[:24])
    mine = translation(folder, test_examples=5)
    wanted = sum(len(english) + 1 for _, english in independently(folder, "val")[:5])
    assert mine.evaluate(mine.model())[1] == wanted


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_mean_of_all_ranks_losses_and_gradients_is_that_of_the_global_batchs_tokens(folder, world_size):
    """The reference takes each sentence alone, without padding, and divides once by all tokens."""
    torch.manual_seed(0)
    model = translation(folder).model().double()
    seen = pairs(epoch(folder)[:1])
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for german, english in seen:
        logs = model(torch.tensor([[*german, END]]), torch.tensor([[BEGIN, *english]]))[0].log_softmax(1)
        right = logs.gather(1, torch.tensor([[*english, END]]).T).sum()
        total, tokens = total - 0.9 * right - 0.1 * logs.mean(1).sum(), tokens + len(english) + 1
    (total / tokens).backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    losses = []
    for rank in range(world_size):  # gradients of several backward passes add up
        mine = translation(folder, share(rank, world_size))
        loss = mine.loss(model, next(mine.batches(0)))
        (loss / world_size).backward()
        losses.append(loss.item())
    assert np.mean(losses) == pytest.approx((total / tokens).item(), rel=1e-12)
    assert len(set(losses)) == world_size  # the shares have unequal numbers of tokens
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(parameter.grad, gradient, rtol=1e-9, atol=1e-13)


@torch.no_grad()
def test_held_out_pairs_are_shared_among_ranks_and_scored_token_by_token(folder):
    torch.manual_seed(0)
    model = translation(folder).model().eval()
    right, loss, tokens = 0, 0.0, 0
    for german, english in independently(folder, "val"):
        logs = model(torch.tensor([[*german, END]]), torch.tensor([[BEGIN, *english]]))[0].log_softmax(1)
        wanted = torch.tensor([*english, END])
        right += int((logs.argmax(1) == wanted).sum())
        loss -= float(logs.gather(1, wanted[:, None]).sum())
        tokens += len(wanted)
    for world_size in (1,):
        sums, counted = {"accuracy": 0.0, "loss": 0.0}, 0
        for rank in range(world_size):
            part, count = translation(folder, share(rank, world_size, seed=8)).evaluate(model)
            sums = {metric: sums[metric] + value for metric, value in part.items()}
            counted += count
        assert (sums["accuracy"], counted) == (right, tokens)
        assert sums["loss"] == pytest.approx(loss, rel=1e-5)
    means = {"loss": loss / tokens, "accuracy": right / tokens}
    assert WORKLOADS["multi30k"].value("perplexity", means) == pytest.approx(math.exp(loss / tokens))


def test_one_vocabulary_is_trained_on_both_sides_and_says_every_text_again(tmp_path, token_cache):
    german = ["Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche.", "Ein Hund – naß!"] * 8
    english = ["Two young, White males are outside near many bushes.", "A wet dog 🐕"] * 8
    held_out = ["Größe?", "żółw"], ["Size \t and “quotes”", "turtle"]
    for part, (one, other) in {"train": (german, english), "val": held_out}.items():
        (tmp_path / f"{part}.de").write_bytes("\r\n".join(one).encode())
        (tmp_path / f"{part}.en").write_text("\n".join(other) + "\n", encoding="utf-8")
    text = read_pairs(options(tmp_path, tokenizer="", vocabulary=330))
    for part, sides in ((text.train, (german, english)), (text.test, held_out)):
        for sentences, lines in zip((part.source, part.target), sides, strict=True):
            cut = [sentences.tokens[start:stop].tolist() for start, stop in pairwise(sentences.starts)]
            assert [text.decode(ids) for ids in cut] == lines
            assert max(map(max, cut)) < 330
    assert text.references() == held_out[1]
    words = [sentence.lengths[0] for sentence in (text.train.source, text.train.target)]
    assert max(words) < 30  # merges of both languages: the bytes alone are 52 and more


@torch.no_grad()
def test_made_up_targets_are_their_sources_reversed():
    mine = translation("synthetic", tokenizer="", train_examples=50, test_examples=7, longest=12)
    assert mine.steps_per_epoch == 4
    seen = pairs(mine.batches(0))
    assert all(english == german[::-1] for german, english in seen)
    lengths = [len(german) for german, _ in seen]
    assert (min(lengths), max(lengths)) == (5, 12)
    ids = [token for german, _ in seen for token in german]
    assert 3 <= min(ids) < max(ids) < 43
    assert mine.evaluate(mine.model())[1] == len(ids := mine._text.test.target.tokens) + 7
    assert mine._text.references()[0] == " ".join(map(str, ids[: mine._text.test.target.starts[1]]))


def test_the_losses_of_micro_batches_average_to_that_of_the_batch(folder):
    workload = translation(folder, share(1, 2))
    batch = next(workload.batches(0))
    model = workload.model().eval()
    parts = workload.micro_batches(batch, 2)
    loss, *losses = (float(workload.loss(model, each).detach()) for each in (batch, *parts))
    assert sum(losses) / 2 == pytest.approx(loss, rel=1e-5)
    assert torch.equal(torch.cat([part.source for part in parts]), batch.source)
    assert sum(workload.loss_terms(part) for part in parts) == pytest.approx(workload.loss_terms(batch))


def zipped(folder, name, spoil):
    """The file `name` gzipped, its bytes changed."""
    plain = folder / name
    (folder / f"{name}.gz").write_bytes(spoil(gzip.compress(plain.read_bytes(), mtime=0)))
    plain.unlink()


def edited(folder, name, line, text):
    lines = (folder / name).read_bytes().split(b"\n")
    lines[line - 1] = text
    (folder / name).write_bytes(b"\n".join(lines))


FAULTS = {
    "a missing side": (
        lambda folder: (folder / "train.en").unlink(), {},
        "/train.en nor train.en.gz exists; both languages are needed",
    ),
    "another language": (lambda folder: None, {"source": "fr"}, "/train.fr nor train.fr.gz exists"),
    "a shorter side": (
        lambda folder: (folder / "train.de").write_text("w1\nw2\n"), {},
        f"/train.de has 2 lines, train.en {TRAIN}; each line needs its translation in the same line of",
    ),
    "an empty file": (lambda folder: (folder / "val.en").write_text(""), {}, "/val.en must have at least"),
    "an empty line": (
        lambda folder: edited(folder, "train.en", 7, b" \t"), {},
        "/train.en: line 7 is empty; remove it",
    ),
    "no text at all": (
        lambda folder: edited(folder, "val.de", 3, b"Stra\xdfe"), {},
        "/val.de must be UTF-8 text: invalid continuation byte",
    ),
    "a cut gzip": (
        lambda folder: zipped(folder, "train.de", lambda packed: packed[:-20]), {},
        "/train.de.gz cannot be read: Compressed file ended before the end-of-stream marker",
    ),
    "another tokenizer": (
        lambda folder: write_tokenizer(folder / "words.json", ["[PAD]", "[UNK]", *WORDS]), {},
        "/words.json must have the tokens [PAD], [BOS], [EOS], but has no [BOS], [EOS]; use another",
    ),
    "long sentences alone": (
        lambda folder: None, {"longest": 1},
        "/train.de: no pair has at most 1 tokens a side; use a larger workload.options.longest",
    ),
    "fewer pairs than asked for": (
        lambda folder: None, {"test_examples": 32},
        "/val.de must have 32 pairs, got 31; complete them, or set workload.options.test_examples: 31",
    ),
    "less than a batch": (
        lambda folder: None, {"train_examples": 11},
        "there are 11 training pairs, fewer than one global batch of 12",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_cannot_serve_are_one_line(fault, tmp_path):
    spoil, changes, message = FAULTS[fault]
    write_pairs(tmp_path)
    spoil(tmp_path)
    with pytest.raises(DataError) as raised:
        translation(tmp_path, **changes)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_files_may_be_gzipped_and_in_a_folder_of_their_own(tmp_path):
    plain, inside = tmp_path / "plain", tmp_path / "root" / "multi30k"
    for folder in (plain, inside):
        folder.mkdir(parents=True)
        write_pairs(folder)
    for name in ("train.de", "val.en"):
        zipped(inside, name, lambda packed: packed)
    (inside / "words.json").rename(tmp_path / "root" / "words.json")
    wanted, got = (translation(folder)._text for folder in (plain, tmp_path / "root"))
    for one, other in ((got.train, wanted.train), (got.test, wanted.test)):
        for side in ("source", "target"):
            assert getattr(one, side).tokens.tolist() == getattr(other, side).tokens.tolist()
            assert getattr(one, side).starts.tolist() == getattr(other, side).starts.tolist()


@pytest.mark.parametrize(("missing", "bleu"), [("tokenizers", False), ("sacrebleu.metrics.bleu", True)])
def test_a_missing_library_names_the_extra(tmp_path, monkeypatch, missing, bleu):
    write_pairs(tmp_path)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=r"needs .*: pip install 'kronscale\[language\]'"):
        translation(tmp_path, bleu=bleu)


def serve(monkeypatch, folder, **broken) -> Server:
    """Publishes the files of a folder, gzipped."""
    packed = {
        f"{split}.{side}.gz": gzip.compress((folder / f"{split}.{side}").read_bytes(), mtime=0)
        for split in ("train", "val")
        for side in ("de", "en")
    }
    published = [
        file._replace(checksum=f"sha256:{hashlib.sha256(packed[file.name]).hexdigest()}")
        for file in PUBLISHED
        if file.name in packed
    ]
    monkeypatch.setattr(sentence_files, "PUBLISHED", published)
    return Server(monkeypatch, {**packed, **broken})


def test_a_download_is_checked_whole_and_done_once(tmp_path, monkeypatch):
    source, root = tmp_path / "source", tmp_path / "new" / "data"
    source.mkdir()
    write_pairs(source)
    server = serve(monkeypatch, source)
    for _ in range(2):
        mine = translation(root, tokenizer="", vocabulary=270, download=True)
        assert len(mine._text.train.indices) == TRAIN
    assert len(server.asked) == 4
    assert sorted(path.name for path in root.iterdir()) == [".multi30k.lock", "multi30k"]
    assert sorted(path.name for path in (root / "multi30k").iterdir()) == [
        "train.de.gz", "train.en.gz", "val.de.gz", "val.en.gz",
    ]  # fmt: skip


def test_a_missing_folder_says_where_to_get_the_data(tmp_path):
    with pytest.raises(DataError) as raised:
        translation(tmp_path / "nowhere")
    message = str(raised.value)
    for part in (
        f"{tmp_path}/nowhere/multi30k does not exist",
        "train.de",
        SOURCE,
        "workload.options.download",
    ):
        assert part in message
