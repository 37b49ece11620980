"""Promise: a packed triangle has exactly n(n+1)/2 elements and loses none of them."""

import pytest
import torch

from kfac_core.collectives.packing import pack, packed_size, unpack


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


def test_packing_is_linear_so_that_sums_of_packed_factors_are_packed_sums():
    a, b = (m + m.mT for m in torch.randn(2, 1, 7, 7, dtype=torch.float64))
    packed = torch.empty(3, 1, packed_size(7), dtype=torch.float64)
    for matrix, out in zip((a, b, a + b), packed, strict=True):
        pack(matrix, out)
    assert torch.allclose(packed[0] + packed[1], packed[2], rtol=0, atol=1e-15)


def test_an_infinite_or_nan_element_stays_where_it_is():
    matrix = torch.zeros(1, 6, 6)
    matrix[0, 1, 4] = matrix[0, 4, 1] = float("nan")
    matrix[0, 2, 2] = float("inf")
    packed, back = torch.empty(1, packed_size(6)), torch.empty(1, 6, 6)
    pack(matrix, packed)
    unpack(packed, back)
    assert torch.equal(back.isnan(), matrix.isnan())
    assert torch.equal(back.isinf(), matrix.isinf())
