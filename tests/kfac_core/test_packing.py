"""Promise: a packed triangle has exactly n(n+1)/2 elements and loses none of them."""

from itertools import product

import pytest
import torch

from kfac_core import packing
from kfac_core.grams import Rows, fold
from kfac_core.packing import fold_packed, pack, packed_size, packed_trace, unpack

LARGEST = packing.LARGEST


@pytest.fixture(params=["tables", "blocks"])
def way(request, monkeypatch):
    """Whether small matrices are packed by tables, as they are, or block by block like large ones."""
    if request.param == "blocks":
        monkeypatch.setattr(packing, "LARGEST", 0)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("n", [*range(1, 12), 64, 65, LARGEST - 1, LARGEST])
def test_tables_give_the_layout_of_blocks(monkeypatch, n, blocks):
    matrix = torch.randn(blocks, n, n)
    matrix += matrix.mT.clone()
    by_table, by_block = torch.full((2, blocks, packed_size(n)), float("nan"))
    pack(matrix, by_table, 0.3)
    torch.testing.assert_close(packed_trace(by_table, n), 0.3 * matrix.diagonal(dim1=1, dim2=2).sum())
    monkeypatch.setattr(packing, "LARGEST", 0)
    pack(matrix, by_block, 0.3)
    assert torch.equal(by_table, by_block)
    monkeypatch.undo()
    pack(matrix.mT, by_table, 0.3)  # not contiguous
    assert torch.equal(by_table, by_block)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("n", [*range(1, 20), 64, 65])
def test_packing_is_a_bijection_of_the_triangle(n):
    matrix = torch.randn(3, n, n, dtype=torch.float64)
    matrix = matrix + matrix.mT
    packed = torch.full((3, packed_size(n)), float("nan"), dtype=torch.float64)
    pack(matrix, packed)
    triangle = matrix[..., *torch.triu_indices(n, n)]
    assert packed.shape[-1] == n * (n + 1) // 2
    assert torch.equal(packed.sort(dim=-1).values, triangle.sort(dim=-1).values)
    back = torch.full_like(matrix, float("nan"))
    unpack(packed, back)
    assert torch.equal(back, matrix)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("n", "blocks"),
    [*product([1, 2, 3, 8, 513], [1, 2]), (1023, 1), (1024, 2), (1025, 1), (1025, 2), (1537, 1)],
)
def test_rows_are_packed_as_their_scaled_product_is(n, blocks):
    rows = torch.randn(blocks, 3, n, dtype=torch.float64)
    product = rows.mT @ rows
    places = [torch.full((blocks, packed_size(n)), float("nan"), dtype=torch.float64) for _ in range(3)]
    pack(Rows(rows), places[0], 0.25)
    pack(product, places[1], 0.25)
    pack(0.25 * product, places[2])
    assert torch.equal(places[1], places[2])
    torch.testing.assert_close(places[0], places[1], rtol=1e-12, atol=1e-12)
    back = torch.empty_like(product)
    unpack(places[1], back)
    assert torch.equal(back.triu(), 0.25 * product.triu())


def test_packing_is_linear_so_that_sums_of_packed_factors_are_packed_sums():
    a, b = (m + m.mT for m in torch.randn(2, 1, 7, 7, dtype=torch.float64))
    packed = torch.empty(3, 1, packed_size(7), dtype=torch.float64)
    for matrix, out in zip((a, b, a + b), packed, strict=True):
        pack(matrix, out)
    assert torch.allclose(packed[0] + packed[1], packed[2], rtol=0, atol=1e-15)


@pytest.mark.usefixtures("way")
def test_an_infinite_or_nan_element_stays_where_it_is():
    matrix = torch.zeros(1, 6, 6)
    matrix[0, 1, 4] = matrix[0, 4, 1] = float("nan")
    matrix[0, 2, 2] = float("inf")
    packed, back = torch.empty(1, packed_size(6)), torch.empty(1, 6, 6)
    pack(matrix, packed)
    unpack(packed, back)
    assert torch.equal(back.isnan(), matrix.isnan())
    assert torch.equal(back.isinf(), matrix.isinf())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(  # in one piece and in strips
    ("n", "blocks"),
    [*product([1, 2, 3, 8, 9], [1, 2]), (1023, 1), (1024, 2), (1025, 1), (1025, 2), (1026, 1), (1283, 2)],
)
def test_folding_a_packed_matrix_is_folding_the_matrix(n, blocks):
    matrix, mean = (m + m.mT for m in torch.randn(2, blocks, n, n, dtype=torch.float64))
    packed = torch.empty(blocks, packed_size(n), dtype=torch.float64)
    pack(matrix, packed)
    torch.testing.assert_close(packed_trace(packed, n), matrix.diagonal(dim1=1, dim2=2).sum())
    folded = mean.clone()
    fold_packed(packed, 0.3, folded, 0.9)
    assert torch.equal(folded, folded.mT)
    fold(matrix, 0.3, mean, 0.9)
    torch.testing.assert_close(folded, mean, rtol=1e-14, atol=1e-14)
    unpack(packed, folded)
    assert torch.equal(folded, matrix)
