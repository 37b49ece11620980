"""Promise: BERT's masks and pairs are those of its paper, and both losses those of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from harness.errors import DataError
from harness.training.passes import micro_batches
from harness.workloads import WORKLOADS
from harness.workloads.language.corpus import Sequences
from harness.workloads.language.language import Bert
from harness.workloads.language.masking import check_documents, draw_pairs, mask, masked_count
from harness.workloads.models.language import bert
from kfac_core.config import KFACConfig
from kfac_core.layers import find_layers
from tests.harness.workloads.texts import SMALL, options, share, write_texts

MASK = 4
ORDINARY = np.arange(5, 105)


def masked(sequences=4000, length=40, epoch=0):
    tokens = np.random.default_rng(1).integers(5, 105, (sequences, length))
    keys = [(7, epoch, number) for number in range(sequences)]
    return tokens, mask(tokens, keys, MASK, ORDINARY)


@pytest.mark.parametrize(("length", "count"), [(2, 1), (10, 2), (40, 6), (126, 19), (510, 76)])
def test_fifteen_in_a_hundred_tokens_are_predicted_at_least_one(length, count):
    assert masked_count(length) == count


def test_holes_are_where_it_says_and_the_answers_are_what_stood_there():
    tokens, (shown, places, wanted) = masked()
    assert (np.diff(places, axis=1) > 0).all()
    assert np.array_equal(np.take_along_axis(tokens, places, 1), wanted)
    restored = shown.copy()
    np.put_along_axis(restored, places, wanted, 1)
    assert np.array_equal(restored, tokens)


def test_of_ten_holes_eight_are_masks_one_is_another_token_and_one_is_left():
    _, (shown, places, wanted) = masked()
    seen = np.take_along_axis(shown, places, 1)
    masks, left = seen == MASK, seen == wanted
    count = seen.size  # 24,000 holes: 4 deviations of a share are below 1.1 %
    assert masks.sum() / count == pytest.approx(0.8, abs=0.0104)
    # one in a hundred of the others happens to be the token itself
    assert left.sum() / count == pytest.approx(0.101, abs=0.0078)
    others = seen[~masks & ~left]
    assert others.size / count == pytest.approx(0.099, abs=0.0078)
    assert set(np.unique(others)) == set(ORDINARY.tolist())


def test_every_place_is_hidden_as_often_as_any_other():
    _, (_, places, _) = masked()
    shares = np.bincount(places.ravel(), minlength=40) / len(places)
    assert np.abs(shares - 0.15).max() < 4.5 * (0.15 * 0.85 / len(places)) ** 0.5


def test_the_key_alone_decides():
    tokens, whole = masked(50)
    other = masked(50, epoch=1)[1]
    some = [31, 4, 17]
    again = mask(tokens[some], [(7, 0, number) for number in some], MASK, ORDINARY)
    assert all(np.array_equal(one[some], two) for one, two in zip(whole, again, strict=True))
    assert not np.array_equal(whole.positions, other.positions)


TOKENS, LENGTH = 1200, 20
NEXT = {"next_sentence": True, "sequence_length": 13}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("texts")
    write_texts(made)
    return made


def text(lines: np.ndarray, documents: np.ndarray) -> Sequences:
    """Tokens that are their own places, so that a pair says where it is from."""
    return Sequences("a text", np.arange(TOKENS), LENGTH, LENGTH, TOKENS // LENGTH, lines, documents)


def irregular() -> Sequences:
    draws = np.random.default_rng(7)
    lines = np.unique(np.r_[0, draws.choice(np.arange(1, TOKENS), 160, replace=False)])
    documents = np.unique(np.r_[0, draws.choice(lines[1:], 24, replace=False)])
    return text(lines, documents)


def drawn(source: Sequences, rounds: int) -> Iterator[tuple[int, list[int], int, bool]]:
    """(start of the window, its tokens, tokens of the first part, whether the second is random)."""
    indices = np.arange(source.count)
    for epoch in range(rounds):
        pairs = draw_pairs(source, indices, [(0, epoch, int(index)) for index in indices])
        for index, tokens, length, is_random in zip(indices.tolist(), *pairs, strict=True):
            yield index * LENGTH, tokens.tolist(), int(length), bool(is_random)


def test_a_first_part_is_followed_by_what_follows_it_or_by_a_line_of_another_document():
    source = irregular()
    lines, firsts = set(source.lines.tolist()), set(source.documents.tolist())

    def document(place: int) -> int:
        return int(np.searchsorted(source.documents, place, "right"))

    randoms = total = 0
    for start, tokens, length, is_random in drawn(source, rounds=40):
        total, randoms = total + 1, randoms + is_random
        assert tokens[:length] == list(range(start, start + length))
        second = tokens[length:]
        assert (np.diff(second) % TOKENS == 1).all()  # consecutive, the text being a circle
        inside = [p for p in range(start + 1, start + LENGTH) if p in lines and p not in firsts]
        assert not inside or start + length in inside
        if is_random:
            assert document(start + length - 1) not in set(map(document, second))
            assert not inside or second[0] in lines
        else:
            assert second[0] == start + length not in firsts
    assert abs(randoms - total / 2) < 4 * math.sqrt(total / 4)


def test_every_line_outside_is_drawn_alike_and_lengths_do_not_tell_the_label():
    source = text(np.arange(0, TOKENS, 10), np.arange(0, TOKENS, 100))
    found = [0] * (TOKENS // 10)
    lengths: dict[bool, list[int]] = {False: [], True: []}
    for _, tokens, length, is_random in drawn(source, rounds=150):
        lengths[is_random].append(length)
        if is_random:
            found[tokens[length] // 10] += 1
    assert min(found) > 0.5 * np.mean(found)
    assert max(found) < 1.5 * np.mean(found)
    assert set(lengths[True]) == set(lengths[False]) == {10}  # the one line start inside


def test_without_a_line_inside_any_token_may_begin_the_second_part_in_either_case():
    source = text(np.arange(0, TOKENS, 300), np.arange(0, TOKENS, 300))
    kinds = {is_random: set() for is_random in (False, True)}
    for start, tokens, length, is_random in drawn(source, rounds=40):
        assert (start + length) % 300  # never a document's first token
        kinds[is_random].add(tokens[length] % 300)
    assert all(len(places) > 200 for places in kinds.values())


def test_documents_that_leave_nothing_to_draw_from_are_refused():
    check_documents(text(np.array([0, 1180]), np.array([0, 1180])))
    with pytest.raises(
        DataError, match=r"a text has a document of 1182 of its 1200 tokens.*next_sentence: false"
    ):
        check_documents(text(np.array([0, 1182]), np.array([0, 1182])))


def test_a_sequence_is_two_parts_with_their_segments_and_the_masked_places_are_words(folder):
    workload = Bert(options("bert", folder, **NEXT), share())
    labels = []
    for shown, places, segments, is_random, wanted in workload.batches(0):
        assert shown.shape == segments.shape == (12, 13)
        for row, of_row, hidden, words in zip(shown.tolist(), segments.tolist(), places, wanted, strict=True):
            ends = [place for place, token in enumerate(row) if token == 3]  # [SEP]
            assert row[0] == 2  # [CLS]
            assert len(ends) == 2
            assert ends[1] == 12
            assert of_row == [0] * (ends[0] + 1) + [1] * (12 - ends[0])
            assert not set(hidden.tolist()) & {0, *ends}
            assert (words >= 5).all()
        labels += is_random.tolist()
    assert 0.3 < np.mean(labels) < 0.7


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_losses_are_those_of_hugging_face_on_the_same_weights(folder, dtype):
    workload = Bert(options("bert", folder, **NEXT, layers=2), share())
    torch.manual_seed(0)
    model = workload.model().to(dtype)
    shown, places, segments, is_random, wanted = batch = next(workload.batches(0))
    labels = torch.full_like(shown, -100).scatter(1, places, wanted)
    theirs = model(input_ids=shown, token_type_ids=segments, labels=labels, next_sentence_label=is_random)
    rel = 1e-5 if dtype == torch.float32 else 1e-10
    assert workload.loss(model, batch).item() == pytest.approx(theirs.loss.item(), rel=rel)
    sums = workload._sums(model, batch)
    words = torch.nn.functional.cross_entropy(theirs.prediction_logits.flatten(0, 1), labels.flatten())
    sentences = torch.nn.functional.cross_entropy(theirs.seq_relationship_logits, is_random)
    count = wanted.numel()
    assert sums["loss"] / count == pytest.approx(words.item(), rel=rel)
    assert sums["next_sentence_loss"] / count == pytest.approx(sentences.item(), rel=rel)
    right = (theirs.seq_relationship_logits.argmax(1) == is_random).double().mean()
    assert sums["next_sentence_accuracy"] / count == pytest.approx(right.item())


def test_micro_batches_have_the_loss_of_the_batch_and_count_its_words_and_sentences(folder):
    workload = Bert(options("bert", folder, **NEXT), share())
    model, batch = workload.model().double(), next(workload.batches(0))
    parts = micro_batches(workload, batch, 3)
    mean = sum(workload.loss(model, part).item() for part in parts) / 3
    assert mean == pytest.approx(workload.loss(model, batch).item(), rel=1e-12)
    assert [workload.loss_terms(part) for part in parts] == [4 * 2] * 3  # two masked words of ten
    assert workload.loss_terms_of(batch) == {"bert.pooler": 12.0, "cls.seq_relationship": 12.0}
    assert Bert(options("bert", folder), share()).loss_terms_of(batch) == {}


def test_kfac_takes_pooler_and_head_of_the_next_sentence():
    sizes = {**WORKLOADS["bert"].options, **SMALL, **NEXT, "vocabulary": 50}
    taken = {
        each.name
        for each in find_layers(bert(sizes), KFACConfig.sc20(skip=("bert.embeddings", "cls.predictions")))
    }
    assert {"bert.pooler.dense", "cls.seq_relationship"} <= taken
    assert len(taken) == 6 + 2
