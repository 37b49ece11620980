"""Promise: BERT's masking is that of its paper, and a matter of its key alone."""

import numpy as np
import pytest

from harness.workloads.language.masking import mask, masked_count

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
