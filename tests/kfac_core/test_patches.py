"""Promise: every fast form of a patch gram is the plain im2col product, for every geometry."""

from itertools import product

import pytest
import torch

from kfac_core.layers.displacement import by_displacement
from kfac_core.layers.patches import Geometry, by_columns, patch_gram, patch_rows, patch_sums

KERNELS = [(1, 1), (1, 3), (2, 1), (3, 2), (3, 3), (5, 5), (7, 7)]
STRIDES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)]
DILATIONS = [(1, 1), (2, 1), (1, 3), (2, 2)]


MARGINS = [(0, 0, 0, 0), (1, 1, 1, 1), (2, 0, 3, 1)]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_fast_forms_equal_im2col(kernel, groups):
    images = torch.randn(3, 4, 15, 19, dtype=torch.float64)
    for stride, dilation, margins in product(STRIDES, DILATIONS, MARGINS):
        geometry = Geometry(kernel, stride, dilation, groups, margins)
        plain = by_columns(images, geometry)
        for layout in (images, images.to(memory_format=torch.channels_last)):
            torch.testing.assert_close(patch_gram(layout, geometry), plain, rtol=1e-12, atol=1e-10)
        sums = patch_rows(images, geometry).sum(1)
        torch.testing.assert_close(patch_sums(images, geometry), sums, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("kernel", [*KERNELS, (2, 4), (4, 1), (3, 5)])
@pytest.mark.parametrize("channels", [1, 3, 8, 16, 33])
def test_displacements_equal_im2col_at_any_size_and_margin(kernel, channels):
    generator = torch.Generator().manual_seed(channels)
    for height, width, margins in [
        (kernel[0], kernel[1], (0, 0, 0, 0)),  # one window
        (7, 7, (3, 3, 3, 3)),
        (8, 9, (1, 1, 1, 1)),
        (9, 8, (0, 2, 1, 0)),
        (7, 10, (5, 0, 0, 6)),  # windows that hold nothing but zeros
    ]:
        images = torch.randn(2, channels, height, width, dtype=torch.float64, generator=generator)
        plain = by_columns(images, Geometry(kernel, margins=margins))[0]
        torch.testing.assert_close(by_displacement(images, kernel, margins), plain, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize(("channels", "size"), [(3, 32), (16, 32), (32, 16), (64, 8)])
def test_float32_is_within_1e_5_of_float64_at_resnet_32_sizes(channels, size):
    images = torch.randn(128, channels, size, size, generator=torch.Generator().manual_seed(0)).relu()
    geometry = Geometry((3, 3), margins=(1, 1, 1, 1))
    total = patch_gram(images, geometry)
    exact = by_columns(images.double(), geometry)
    assert (total - exact).norm() < 1e-6 * exact.norm()
    assert ((total - exact).abs() <= 1e-5 * exact.abs()).all()
