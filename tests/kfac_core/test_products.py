"""Promise: a product is the same up to rounding by any library and for any memory layout."""

from itertools import product

import pytest
import torch

from kfac_core import grams
from kfac_core import matmul as products
from kfac_core.grams import Rows, fold, outer_sum
from kfac_core.matmul import is_amd, multiply, prefers_onednn
from kfac_core.packing import pack, packed_size, unpack


@pytest.fixture
def fresh_caches():
    for cached in (products._linear, is_amd):
        cached.cache_clear()
    yield
    for cached in (products._linear, is_amd):
        cached.cache_clear()


@pytest.fixture
def onednn(monkeypatch, fresh_caches):
    """oneDNN multiplies whatever the processor and however small the matrices."""
    monkeypatch.setattr(products, "is_amd", lambda: True)
    monkeypatch.setattr(products, "_MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(grams, "_ONEDNN_MIN_N", 1)
    if products._linear() is None:
        pytest.skip("this torch has no oneDNN")


def test_an_amd_processor_is_recognised_by_its_name(monkeypatch, fresh_caches):
    for name, amd in {"AMD EPYC 9755": True, "Intel(R) Xeon(R) Platinum 8481C": False}.items():
        is_amd.cache_clear()
        monkeypatch.setattr(
            torch.cpu, "get_capabilities", lambda name=name: {"cpu_name": name}, raising=False
        )
        assert is_amd() == amd
    is_amd.cache_clear()
    monkeypatch.delattr(torch.cpu, "get_capabilities")
    assert not is_amd()


def test_blas_multiplies_where_it_is_as_fast(monkeypatch, fresh_caches):
    monkeypatch.setattr(products, "is_amd", lambda: False)
    assert products._linear() is None
    assert not prefers_onednn(torch.randn(400, 400))
    one, other = torch.randn(400, 500), torch.randn(500, 300)
    assert torch.equal(multiply(one, other), one @ other)


def test_blas_multiplies_what_onednn_cannot(onednn):
    exact = torch.randn(300, 300, dtype=torch.float64)
    assert prefers_onednn(exact.float())
    for matrix in (exact, exact.to("meta"), torch.nn.Parameter(exact)):
        assert not prefers_onednn(matrix)
    assert torch.equal(multiply(exact, exact.mT), exact @ exact.mT)
    batch = torch.randn(3, 40, 50)
    assert torch.equal(multiply(batch, batch.mT), batch @ batch.mT)
    assert multiply(torch.randn(0, 5), torch.randn(5, 3)).shape == (0, 3)
    assert torch.equal(multiply(torch.randn(2, 0), torch.randn(0, 3)), torch.zeros(2, 3))


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 70, 5), (64, 576, 576), (300, 200, 129)])
def test_a_product_by_onednn_equals_that_of_blas(onednn, shape):
    m, k, n = shape
    generator = torch.Generator().manual_seed(0)
    exact_one = torch.randn(m, k, dtype=torch.float64, generator=generator)
    exact_other = torch.randn(k, n, dtype=torch.float64, generator=generator)
    exact = exact_one @ exact_other
    ones, others = (list(_layouts(matrix.float())) for matrix in (exact_one, exact_other))
    for one, other in product(ones, others):
        out = torch.full((m, 2 * n), torch.nan)[:, ::2] if n > 1 else torch.full((m, n), torch.nan)
        before = one.clone(), other.clone()
        assert multiply(one, other, out) is out
        for found in (out, multiply(one, other)):
            assert (found - exact).abs().max() <= 1e-6 * k * max(1.0, exact.abs().max())
        assert torch.equal(one, before[0]) and torch.equal(other, before[1])


def _layouts(matrix):
    """By row, by column, as part of a larger matrix by row and by column, and with gaps."""
    rows, columns = matrix.shape
    yield matrix.contiguous()
    yield matrix.mT.contiguous().mT
    wide = torch.randn(rows + 3, columns + 2)
    wide[1 : rows + 1, 1 : columns + 1] = matrix
    yield wide[1 : rows + 1, 1 : columns + 1]
    tall = wide.mT.contiguous().mT
    yield tall[1 : rows + 1, 1 : columns + 1]
    gaps = torch.randn(2 * rows, 2 * columns)
    gaps[::2, ::2] = matrix
    yield gaps[::2, ::2]


@pytest.mark.parametrize("n", [1, 24, 63, 256, 515])
@pytest.mark.parametrize("batches", [1, 3])
def test_sums_of_outer_products_are_symmetric_and_exact(onednn, n, batches):
    rows = torch.randn(batches, 700, n, generator=torch.Generator().manual_seed(0))
    exact = torch.einsum("bri,brj->ij", *2 * [rows.double()])
    for layout in (rows, rows.mT.contiguous().mT, torch.randn(batches, 700, 2 * n)[..., ::2].copy_(rows)):
        total = outer_sum(layout)
        assert ((total - exact).abs() <= 2e-6 * exact.diagonal().max()).all()
        assert (total - total.mT).abs().max() <= 1e-6 * exact.diagonal().max()


@pytest.mark.parametrize("n", [130, 257, 600])
@pytest.mark.parametrize("count", [1, 70])
def test_kept_rows_are_folded_and_packed_as_their_product(onednn, monkeypatch, n, count):
    monkeypatch.setattr(grams, "_ONEDNN_MIN_FOLD", 1)
    rows = torch.randn(1, count, n, generator=torch.Generator().manual_seed(0))
    exact = rows.double().mT @ rows.double()
    mean = torch.eye(n).repeat(1, 1, 1)
    fold(Rows(rows), 0.25, mean, 0.5)
    torch.testing.assert_close(mean.double(), 0.25 * exact + 0.5 * torch.eye(n), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mean, mean.mT)
    triangle, matrix = torch.empty(1, packed_size(n)), torch.empty(1, n, n)
    pack(Rows(rows), triangle, 0.25)
    unpack(triangle, matrix)
    torch.testing.assert_close(matrix.double(), 0.25 * exact, rtol=1e-5, atol=1e-5)
