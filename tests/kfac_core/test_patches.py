"""Promise: every form of a patch Gram matrix equals the product of im2col's patches, for every geometry."""

from itertools import product

import pytest
import torch
from torch.nn import functional

from kfac_core import convolution as patches
from kfac_core import convolution as row_shift
from kfac_core import convolution as spectrum
from kfac_core.convolution import (
    Geometry,
    by_displacement,
    by_spectrum,
    correlate,
    im2col,
    multiplications,
    patch_gram,
    patch_rows,
    patch_sums,
    pixel_gram,
)
from kfac_core.grams import dense

KERNELS = [(1, 1), (1, 3), (2, 1), (3, 2), (3, 3), (5, 5), (7, 7)]
STRIDES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)]
DILATIONS = [(1, 1), (2, 1), (1, 3), (2, 2)]
PADDINGS = [(0, 0, 0, 0), (1, 1, 1, 1), (2, 0, 3, 1)]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_patch_rows_are_torchs_unfold(kernel, groups):
    images = torch.randn(3, 4, 15, 19, dtype=torch.float64)
    for stride, dilation, padding in product(STRIDES, DILATIONS, PADDINGS):
        geometry = Geometry(kernel, stride, dilation, groups, padding)
        unfolded = functional.unfold(geometry.pad(images), kernel, dilation=dilation, stride=stride)
        rows = unfolded.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
        for layout in (images, images.to(memory_format=torch.channels_last)):
            assert torch.equal(patch_rows(layout, geometry), rows)


@pytest.mark.parametrize("channels", [1, 2, 3, 7, 8, 15, 16, 31, 32])
def test_narrow_images_equal_im2col(channels):
    for size, geometry in product([15, 16, 32], [Geometry((3, 3), padding=(1, 1, 1, 1)), Geometry((5, 5))]):
        images = torch.randn(4, channels, size, size, dtype=torch.float64)
        plain = im2col(images, geometry)
        torch.testing.assert_close(patch_gram(images, geometry), plain, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_a_large_batch_of_patches_is_taken_in_parts(monkeypatch, parts):
    """The form that GPUs use; the device is not asked for here."""
    images = torch.randn(7, 4, 9, 9, dtype=torch.float64)
    geometry = Geometry((3, 3), groups=2, padding=(1, 1, 1, 1))
    whole = im2col(images, geometry)
    monkeypatch.setattr(patches, "_PATCH_ELEMENTS", 4 * 9 * 81 * parts)
    torch.testing.assert_close(im2col(images, geometry), whole, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("kernel", KERNELS)
def test_fast_forms_equal_im2col(kernel, groups):
    images = torch.randn(3, 4, 15, 19, dtype=torch.float64)
    for stride, dilation, padding in product(STRIDES, DILATIONS, PADDINGS):
        geometry = Geometry(kernel, stride, dilation, groups, padding)
        plain = im2col(images, geometry)
        for layout in (images, images.to(memory_format=torch.channels_last)):
            torch.testing.assert_close(patch_gram(layout, geometry), plain, rtol=1e-12, atol=1e-10)
        sums = patch_rows(images, geometry).sum(1)
        torch.testing.assert_close(patch_sums(images, geometry), sums, rtol=1e-12, atol=1e-10)


# Every number of channels with few and many pixels of a column together, at one kernel; all kernels at some.
STRIDE_1 = [
    *(((3, 3), channels, batch) for channels in (1, 3, 8, 16, 33) for batch in (1, 2, 40)),
    *(
        (kernel, channels, batch)
        for kernel in [*KERNELS, (3, 1), (2, 2), (2, 4), (4, 1), (3, 5)]
        for channels, batch in [(1, 2), (8, 40), (16, 1)]
        if kernel != (3, 3)
    ),
]


@pytest.mark.parametrize(("kernel", "channels", "batch"), STRIDE_1)
@pytest.mark.parametrize("form", [by_displacement, by_spectrum])
def test_stride_1_forms_equal_im2col_at_any_size_and_padding(form, kernel, channels, batch):
    generator = torch.Generator().manual_seed(channels)
    for height, columns, padding in [
        (kernel[0], kernel[1], (0, 0, 0, 0)),  # one window
        (7, 7, (3, 3, 3, 3)),
        (8, 9, (1, 1, 1, 1)),
        (9, 8, (0, 2, 1, 0)),
        (7, 10, (5, 0, 0, 6)),  # windows that hold nothing but zeros
    ]:
        images = torch.randn(batch, channels, height, columns, dtype=torch.float64, generator=generator)
        plain = im2col(images, Geometry(kernel, padding=padding))[0]
        for layout in (images, images.to(memory_format=torch.channels_last)):
            torch.testing.assert_close(form(layout, kernel, padding), plain, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize(  # each pair of two of them once
    ("channels", "batch", "size"),
    [
        (8, 1, (8, 8)), (8, 2, (7, 12)), (8, 128, (32, 32)), (16, 1, (7, 12)), (16, 2, (32, 32)),
        (16, 128, (8, 8)), (40, 1, (32, 32)), (40, 2, (8, 8)), (40, 128, (7, 12)),
    ],
)  # fmt: skip
def test_stride_1_forms_are_within_rounding_of_float64(channels, batch, size):
    images = torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(0)).relu()
    for kernel, padding in [((3, 3), (1, 1, 1, 1)), ((3, 3), (0, 0, 0, 0)), ((2, 3), (2, 0, 1, 1))]:
        exact = im2col(images.double(), Geometry(kernel, padding=padding))[0]
        assert ((by_displacement(images, kernel, padding) - exact).abs() <= 5e-6 * exact.abs()).all()
        norms = exact.diagonal().sqrt()
        total = by_spectrum(images, kernel, padding)
        assert ((total - exact).abs() <= 2e-6 * torch.outer(norms, norms)).all()


@pytest.mark.parametrize(
    ("channels", "size", "kernel"),
    [
        (32, (7, 7), (3, 3)), (64, (8, 8), (3, 3)), (32, (9, 14), (3, 3)), (32, (16, 16), (3, 3)),
        (64, (7, 7), (2, 3)), (32, (8, 8), (2, 3)), (32, (7, 7), (1, 3)), (64, (9, 14), (1, 3)),
        (32, (8, 8), (5, 5)), (32, (16, 16), (5, 5)),
    ],
)  # fmt: skip
def test_a_spectrum_is_as_exact_as_the_channels_are_large(kernel, size, channels):
    """Each element relative to the lengths of its two channels: also where signs and sizes are mixed."""
    generator = torch.Generator().manual_seed(sum(size))
    images = torch.randn(60, channels, *size, generator=generator)
    images *= torch.logspace(-6, 6, channels).view(-1, 1, 1)
    images[:, 3] = 0
    exact = torch.zeros(kernel[0], 2 * kernel[1] - 1, channels, channels, dtype=torch.float64)
    wide = functional.pad(images.double(), (kernel[1] - 1, kernel[1] - 1, 0, kernel[0] - 1))
    for down, right in product(range(kernel[0]), range(2 * kernel[1] - 1)):
        moved = wide[:, :, down : down + size[0], right : right + size[1]]
        exact[down, right] = torch.einsum("bchw,bdhw->cd", images.double(), moved)
    total = correlate(images, kernel)
    lengths = images.double().square().sum((0, 2, 3)).sqrt()
    assert ((total - exact).abs() <= 1e-6 * torch.outer(lengths, lengths)).all()
    assert not total[..., 3, :].any()
    assert not total[..., :, 3].any()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_diagonal_by_spectrum_too(number):
    images = torch.randn(4, 8, 8, 8)
    images[1, 5, 3, 2] = number
    total = by_spectrum(images, (3, 3), (1, 1, 1, 1))
    assert not total.diagonal().view(8, 9)[5].isfinite().any()
    assert total.diagonal().view(8, 9)[[0, 1, 2, 3, 4, 6, 7]].isfinite().all()


@pytest.mark.parametrize(
    ("shape", "kernel", "dtype", "form"),
    [
        ((128, 64, 8, 8), (3, 3), torch.float32, "by_spectrum"),
        ((128, 64, 8, 8), (3, 3), torch.float64, "by_spectrum"),
        ((128, 64, 8, 8), (3, 3), torch.bfloat16, "by_displacement"),  # could not hold a spectrum
        ((128, 32, 16, 16), (3, 3), torch.float32, "by_spectrum"),
        ((128, 16, 32, 32), (3, 3), torch.float32, "by_spectrum"),
        ((8, 128, 8, 8), (3, 3), torch.float32, "by_displacement"),  # the way back outweighs so few images
        ((32, 256, 14, 14), (3, 3), torch.float32, "by_spectrum"),
        ((128, 64, 2, 2), (3, 3), torch.float32, "by_row_shift"),  # smaller than the kernel
        ((128, 4, 8, 8), (3, 3), torch.float32, "by_row_shift"),  # few channels
        ((128, 64, 8, 8), (1, 1), torch.float32, "by_displacement"),
    ],
)
def test_the_form_follows_from_the_shape(shape, kernel, dtype, form, monkeypatch):
    called = []
    for name in ("by_spectrum", "by_displacement", "by_row_shift"):
        real = getattr(patches, name)
        monkeypatch.setattr(
            patches, name, lambda *operands, name=name, real=real: called.append(name) or real(*operands)
        )
    patch_gram(torch.zeros(shape, dtype=dtype), Geometry(kernel, padding=(1, 1, 1, 1)))
    assert called == [form]


def test_multiplications_by_displacement_count_pixels_that_have_partners():
    pairs = sum((8 - down) * (8 - abs(right)) for down in range(3) for right in range(-2, 3))
    assert multiplications(torch.Size((128, 64, 8, 8)), (3, 3))[1] == 128 * 64**2 * pairs


def test_spectra_of_the_cpu_ignore_the_default_device():
    spectrum._tables.cache_clear()
    with torch.device("meta"):
        correlation = correlate(torch.ones(2, 16, 8, 8, device="cpu"), (3, 3))
    torch.testing.assert_close(correlation[1, 2], torch.full((16, 16), 2.0 * 7 * 8))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("kernel", [(4, 4), (5, 2), (8, 8)])
def test_windows_that_do_not_overlap_equal_im2col(kernel, groups):
    """As those that cut images into patches for a transformer; one leaves pixels between them out."""
    images = torch.randn(3, 4, 19, 17, dtype=torch.float64)
    for stride in (kernel, (kernel[0] + 1, kernel[1] + 2)):
        geometry = Geometry(kernel, stride, groups=groups, padding=(1, 0, 0, 2))
        torch.testing.assert_close(
            patch_gram(images, geometry), im2col(images, geometry), rtol=1e-12, atol=1e-10
        )


@pytest.mark.parametrize("elements", [1, 5000, 1 << 24])
@pytest.mark.parametrize("channels", [3, 12, 90])  # narrow, between, and wide
@pytest.mark.parametrize("stride", [1, 2, 3])
def test_a_batch_taken_in_parts_equals_im2col(monkeypatch, elements, channels, stride):
    monkeypatch.setattr(row_shift, "_BUFFER_ELEMENTS", elements)
    images = torch.randn(7, channels, 9, 11, dtype=torch.float64)
    geometry = Geometry((3, 3), (stride, stride), padding=(1, 1, 1, 1))
    for layout in (images, images.to(memory_format=torch.channels_last)):
        torch.testing.assert_close(
            row_shift.by_row_shift(layout, geometry), im2col(images, geometry), rtol=1e-12, atol=1e-10
        )


@pytest.mark.parametrize("channels", [7, 8, 20, 31, 64])
@pytest.mark.parametrize("size", [(2, 5), (3, 3), (16, 3), (5, 33)])
def test_every_number_of_channels_has_its_exact_form(channels, size):
    """Also an image smaller than the kernel."""
    images = torch.randn(5, channels, *size, dtype=torch.float64)
    geometry = Geometry((3, 3), padding=(1, 1, 1, 1))
    torch.testing.assert_close(patch_gram(images, geometry), im2col(images, geometry), rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("channels", [6, 256, 262])
@pytest.mark.parametrize("size", [(2, 3), (8, 9)])
def test_pixels_in_any_layout_are_summed_alike(groups, channels, size):
    images = torch.randn(30, channels, *size, dtype=torch.float64)
    plain = torch.einsum("bgcp,bgdp->gcd", *2 * [images.flatten(2).unflatten(1, (groups, -1))])
    for layout in (images, images.to(memory_format=torch.channels_last)):
        torch.testing.assert_close(dense(pixel_gram(layout, groups)), plain, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize(("channels", "size"), [(3, 32), (16, 32), (32, 16), (64, 8)])
def test_float32_is_within_1e_5_of_float64_at_resnet_32_sizes(channels, size):
    images = torch.randn(128, channels, size, size, generator=torch.Generator().manual_seed(0)).relu()
    geometry = Geometry((3, 3), padding=(1, 1, 1, 1))
    total = patch_gram(images, geometry)
    exact = im2col(images.double(), geometry)
    assert (total - exact).norm() < 1e-6 * exact.norm()
    assert ((total - exact).abs() <= 1e-5 * exact.abs()).all()


@pytest.mark.parametrize(
    ("batch", "channels", "groups", "size"),
    [(128, 1, 1, 64), (128, 2, 1, 48), (512, 3, 1, 32), (128, 8, 1, 32), (128, 11, 1, 33), (128, 4, 4, 32)],
)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_thin_products_of_many_pixels_are_as_exact(batch, channels, groups, size, stride, layout):
    """Where a BLAS adds up one row after another, an error grows with their number: MKL on AMD, to 5e-5."""
    images = torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(0)).relu()
    images = images.to(memory_format=layout)
    geometry = Geometry((3, 3), (stride, stride), padding=(1, 1, 1, 1), groups=groups)
    for total, exact in (
        (patch_gram(images, geometry), im2col(images.double(), geometry)),
        (dense(pixel_gram(images, groups)), dense(pixel_gram(images.double(), groups))),
    ):
        assert ((total - exact).abs() <= 2e-6 * exact.abs()).all()
