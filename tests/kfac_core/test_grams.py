"""Promise: grams kept as rows, packed as triangles, or made by any library equal the plain product."""

from itertools import product

import pytest
import torch

from kfac_core import grams, matmul, packing
from kfac_core.grams import Rows, dense, fold, gram, is_finite, outer_sum
from kfac_core.matmul import copy_pixels, is_amd, multiply, prefers_onednn, transposed
from kfac_core.packing import fold_packed, pack, packed_size, packed_trace, unpack


def rows_of(count, n, blocks=1):
    return torch.randn(blocks, count, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("with_ones", [False, True])
@pytest.mark.parametrize(("count", "n", "kept"), [(3, 12, True), (4, 12, False), (50, 7, False)])
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
    [(2, 9, 3), (40, 9, 3), (64, 640, 1), (100, 700, 2), (800, 700, 1)],
)
def test_folding_is_decay_times_old_plus_scale_times_new(count, n, blocks):
    rows = rows_of(count, n, blocks)
    mean = torch.randn(blocks, n, n, dtype=torch.float64)
    mean += mean.mT.clone()
    expected = 0.9 * mean + 0.3 * (rows.mT @ rows)
    fold(gram(rows), 0.3, mean, 0.9)
    torch.testing.assert_close(mean, expected)


@pytest.mark.parametrize(  # as rows, and multiplied
    ("count", "bad"), [(2, float("nan")), (2, 1e30), (60, float("inf")), (60, 1e30)]
)
def test_one_bad_number_anywhere_is_detected(count, bad):
    rows = rows_of(count, 30).float()
    assert is_finite(gram(rows))
    rows[0, 1, 17] = bad  # 1e30 squared overflows float32
    assert not is_finite(gram(rows))


LARGEST = packing.LARGEST


@pytest.fixture(params=["tables", "blocks"])
def way(request, monkeypatch):
    """Whether small matrices are packed by tables, as they are, or block by block like large ones."""
    if request.param == "blocks":
        monkeypatch.setattr(packing, "LARGEST", 0)


@pytest.mark.parametrize(
    ("n", "blocks"),
    [(1, 1), (2, 3), (3, 1), (8, 3), (9, 1), (64, 3), (65, 1), (LARGEST - 1, 1), (LARGEST, 3)],
)
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
@pytest.mark.parametrize(
    ("n", "blocks"),
    [(1, 1), (2, 2), (8, 1), (513, 2), (1024, 2), (1025, 1)],
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


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(  # in one piece and in strips
    ("n", "blocks"),
    [(1, 2), (2, 1), (3, 2), (9, 1), (1024, 1), (1025, 2), (1283, 1)],
)
def test_folding_a_packed_matrix_is_folding_the_matrix(n, blocks):
    matrix, mean = (m + m.mT for m in torch.randn(2, blocks, n, n, dtype=torch.float64))
    packed = torch.full((blocks, n * (n + 1) // 2), float("nan"), dtype=torch.float64)
    pack(matrix, packed)
    torch.testing.assert_close(packed_trace(packed, n), matrix.diagonal(dim1=1, dim2=2).sum())
    for decay in (0.9, 1.0, 0.0):
        folded = mean.clone()
        fold_packed(packed, 0.3, folded, decay)
        assert torch.equal(folded, folded.mT)
        fold(matrix, 0.3, mean, decay)
        torch.testing.assert_close(folded, mean, rtol=1e-14, atol=1e-14)
    unpack(packed, folded)
    assert torch.equal(folded, matrix)


@pytest.fixture
def fresh_caches():
    for cached in (matmul._linear, is_amd):
        cached.cache_clear()
    yield
    for cached in (matmul._linear, is_amd):
        cached.cache_clear()


@pytest.fixture
def onednn(monkeypatch, fresh_caches):
    """oneDNN multiplies whatever the processor and however small the matrices."""
    monkeypatch.setattr(matmul, "is_amd", lambda: True)
    monkeypatch.setattr(matmul, "_MIN_MULTIPLICATIONS", 1)
    monkeypatch.setattr(grams, "_ONEDNN_MIN_N", 1)
    if matmul._linear() is None:
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
    monkeypatch.setattr(matmul, "is_amd", lambda: False)
    assert matmul._linear() is None
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


@pytest.mark.parametrize(("n", "batches"), [(1, 3), (24, 1), (63, 3), (256, 1), (515, 3)])
def test_sums_of_outer_products_are_symmetric_and_exact(onednn, n, batches):
    rows = torch.randn(batches, 700, n, generator=torch.Generator().manual_seed(0))
    exact = torch.einsum("bri,brj->ij", *2 * [rows.double()])
    for layout in (rows, rows.mT.contiguous().mT, torch.randn(batches, 700, 2 * n)[..., ::2].copy_(rows)):
        total = outer_sum(layout)
        assert ((total - exact).abs() <= 2e-6 * exact.diagonal().max()).all()
        assert (total - total.mT).abs().max() <= 1e-6 * exact.diagonal().max()


@pytest.mark.parametrize(("n", "count"), [(130, 70), (257, 1), (600, 70)])
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


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 7), torch.float32), ((33, 129), torch.bfloat16), ((3, 2, 9, 17), torch.float64),
        ((64, 64), torch.float32), ((2, 0, 3), torch.float32), ((0, 2, 3), torch.float32),
    ],
)  # fmt: skip
def test_a_transposed_copy_equals_the_transpose(shape, dtype):
    matrices = torch.randn(shape).to(dtype)
    copy = transposed(matrices)
    assert copy.is_contiguous() and copy.dtype == dtype
    assert torch.equal(copy, matrices.mT)
    copy.zero_()
    assert shape == matrices.shape and torch.equal(matrices == 0, torch.zeros(shape, dtype=torch.bool))


def test_the_source_of_a_copy_may_have_any_strides():
    matrices = torch.randn(6, 40, 50)
    for part in (matrices[:, 3:20, 5::2], matrices.mT, matrices.transpose(0, 1), matrices[::2, 1]):
        assert torch.equal(transposed(part), part.mT.clone())


@pytest.mark.parametrize(
    ("together", "layout"),
    [(1, torch.contiguous_format), (100, torch.channels_last), (1 << 18, torch.contiguous_format)],
)
def test_pixels_are_copied_to_any_strides(monkeypatch, together, layout):
    monkeypatch.setattr(matmul, "_IN_CACHE", together)
    images = torch.randn(5, 3, 4, 6).to(memory_format=layout)
    plain = images.permute(0, 2, 3, 1)
    by_row = torch.full((4, 5, 8, 3), torch.nan)
    copy_pixels(images, by_row[:, :, 1:7].transpose(0, 1))
    assert torch.equal(by_row[:, :, 1:7].transpose(0, 1), plain)
    assert by_row[:, :, [0, 7]].isnan().all()
    by_place = torch.empty(4, 6, 5, 3)
    copy_pixels(images, by_place.permute(2, 0, 1, 3))
    assert torch.equal(by_place.permute(2, 0, 1, 3), plain)
    copy_pixels(images[1:4], by_place.permute(2, 0, 1, 3)[:3])
    assert torch.equal(by_place.permute(2, 0, 1, 3)[:3], plain[1:4])
