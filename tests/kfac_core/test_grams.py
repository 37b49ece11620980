"""Promise: a gram kept as rows equals the gram; folding it into a mean is the textbook update."""

import pytest
import torch

from kfac_core import grams
from kfac_core.grams import Rows, dense, fold, gram, is_finite, outer_sum


def rows_of(count, n, blocks=1):
    return torch.randn(blocks, count, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("with_ones", [False, True])
@pytest.mark.parametrize(
    ("count", "n", "kept"), [(3, 12, True), (4, 12, False), (1, 5, True), (50, 7, False)]
)
def test_few_rows_are_kept_and_many_are_multiplied(count, n, kept, with_ones):
    rows = rows_of(count, n, blocks=2)
    found = gram(rows, with_ones=with_ones)
    assert isinstance(found, Rows) == kept
    longer = torch.cat([rows, torch.ones(2, count, 1)], -1) if with_ones else rows
    plain = torch.einsum("bri,brj->bij", longer, longer)
    torch.testing.assert_close(dense(found), plain)


@pytest.mark.parametrize(
    ("n", "count", "strips"),
    [(1, 20, 1), (63, 200, 1), (64, 127, 1), (64, 128, 2), (101, 90, 2), (255, 20, 1), (255, 40, 2),
     (256, 20, 1), (256, 32, 4), (257, 40, 4), (515, 20, 4)],
)  # fmt: skip
def test_strips_of_the_upper_triangle_are_the_whole_product(n, count, strips):
    for rows in (rows_of(count, n, blocks=3), rows_of(n, count, blocks=3).mT):
        assert grams._strip_count(rows) == strips
        found = outer_sum(rows)
        torch.testing.assert_close(found, torch.einsum("bri,brj->ij", rows, rows), rtol=1e-12, atol=1e-10)


def test_kept_rows_do_not_change_with_the_callers_memory():
    rows = rows_of(2, 20)
    found, before = gram(rows), dense(gram(rows))
    rows.zero_()
    assert torch.equal(dense(found), before)


@pytest.mark.parametrize(
    ("count", "n", "blocks"),
    [(2, 9, 3), (40, 9, 3), (3, 700, 1), (64, 640, 1), (100, 700, 1), (100, 700, 2), (800, 700, 1)],
)
def test_folding_is_decay_times_old_plus_scale_times_new(count, n, blocks):
    rows = rows_of(count, n, blocks)
    mean = torch.randn(blocks, n, n, dtype=torch.float64)
    mean += mean.mT.clone()
    expected = 0.9 * mean + 0.3 * (rows.mT @ rows)
    fold(gram(rows), 0.3, mean, 0.9)
    torch.testing.assert_close(mean, expected)


@pytest.mark.parametrize("count", [2, 60])  # as rows, and multiplied
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_one_bad_number_anywhere_is_detected(count, bad):
    rows = rows_of(count, 30).float()
    assert is_finite(gram(rows))
    rows[0, 1, 17] = bad  # 1e30 squared overflows float32
    assert not is_finite(gram(rows))
