"""Promise: transposed copies equal the transpose, element by element, for any source strides."""

import pytest
import torch

from kfac_core import matmul as transpose
from kfac_core.matmul import copy_pixels, transposed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [(1, 1), (1, 7), (7, 1), (64, 64), (33, 129), (2, 5, 3), (3, 2, 9, 17), (0, 4), (2, 0, 3), (0, 2, 3)],
)
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


@pytest.mark.parametrize("together", [1, 100, 1 << 18])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pixels_are_copied_to_any_strides(monkeypatch, together, layout):
    monkeypatch.setattr(transpose, "_IN_CACHE", together)
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
