"""Promise: every fast form of a patch gram is the plain im2col product, for every geometry."""

from itertools import product

import pytest
import torch

from kfac_core.layers.patches import by_columns, patch_gram

KERNELS = [(1, 1), (1, 3), (2, 1), (3, 2), (3, 3), (5, 5), (7, 7)]
STRIDES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)]
DILATIONS = [(1, 1), (2, 1), (1, 3), (2, 2)]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_fast_forms_equal_im2col(kernel, groups):
    images = torch.randn(3, 4, 15, 19, dtype=torch.float64)
    for stride, dilation in product(STRIDES, DILATIONS):
        for layout in (images, images.to(memory_format=torch.channels_last)):
            total, sums = patch_gram(layout, kernel, stride, dilation, groups)
            plain, plain_sums = by_columns(images, kernel, stride, dilation, groups)
            torch.testing.assert_close(total, plain, rtol=1e-12, atol=1e-10)
            torch.testing.assert_close(sums, plain_sums, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize(("channels", "size"), [(16, 32), (32, 16), (64, 8)])
def test_float32_is_within_1e_5_of_float64_at_resnet_32_sizes(channels, size):
    images = torch.randn(32, channels, size + 2, size + 2, generator=torch.Generator().manual_seed(0))
    total, _ = patch_gram(images, (3, 3), (1, 1), (1, 1), 1)
    exact, _ = by_columns(images.double(), (3, 3), (1, 1), (1, 1), 1)
    assert (total - exact).norm() < 1e-5 * exact.norm()
    assert torch.equal(total, total.mT)
