"""Promise: every form of a patch Gram matrix equals the product of im2col's patches, for every geometry."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn import functional

from kfac_core import convolution
from kfac_core.convolution import (
    Geometry,
    by_displacement,
    by_row_shift,
    by_spectrum,
    correlate,
    im2col,
    multiplications,
    patch_gram,
    patch_rows,
    patch_sums,
    pixel_gram,
    plan_tap_sums,
)
from kfac_core.grams import dense

KERNELS = [(1, 1), (1, 3), (2, 1), (3, 2), (3, 3), (5, 5), (7, 7)]
STRIDES = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)]
DILATIONS = [(1, 1), (2, 1), (1, 3), (2, 2)]
PADDINGS = [(0, 0, 0, 0), (1, 1, 1, 1), (2, 0, 3, 1)]
OTHERS = list(product(STRIDES, DILATIONS, [1, 2, 4], PADDINGS))
CHANNELS_LAST = torch.channels_last


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("kernel", KERNELS)
def test_patches_are_those_of_torchs_unfold_and_fast_forms_equal_im2col(kernel):
    images = torch.randn(3, 4, 15, 19, dtype=torch.float64)
    for stride, dilation, groups, padding in OTHERS[KERNELS.index(kernel) :: len(KERNELS)]:
        geometry = Geometry(kernel, stride, dilation, groups, padding)
        unfolded = functional.unfold(geometry.pad(images), kernel, dilation=dilation, stride=stride)
        rows = unfolded.unflatten(1, (groups, -1)).permute(1, 0, 3, 2).flatten(1, 2)
        close(im2col(images, geometry), rows.mT @ rows)
        close(patch_sums(images, geometry), rows.sum(1))
        for layout in (images, images.to(memory_format=CHANNELS_LAST)):
            assert torch.equal(patch_rows(layout, geometry), rows)
            close(patch_gram(layout, geometry), rows.mT @ rows)


@pytest.mark.parametrize(  # widths at which the form changes; also images smaller than the kernel
    ("channels", "size"),
    [
        (1, (15, 15)), (2, (32, 32)), (3, (2, 5)), (7, (3, 3)), (8, (16, 16)), (15, (16, 3)), (16, (5, 33)),
        (20, (2, 5)), (31, (15, 15)), (32, (3, 3)), (64, (16, 3)),
    ],
)  # fmt: skip
def test_every_number_of_channels_has_its_exact_form(channels, size):
    images = torch.randn(4, channels, *size, dtype=torch.float64)
    for geometry in (Geometry((3, 3), padding=(1, 1, 1, 1)), Geometry((5, 5), padding=(2, 2, 2, 2))):
        close(patch_gram(images, geometry), im2col(images, geometry))


def test_a_large_batch_of_patches_is_taken_in_parts(monkeypatch):
    images = torch.randn(7, 4, 9, 9, dtype=torch.float64)
    geometry = Geometry((3, 3), groups=2, padding=(1, 1, 1, 1))
    whole = im2col(images, geometry)
    monkeypatch.setattr(convolution, "_PATCH_ELEMENTS", 4 * 9 * 81 * 3)
    close(im2col(images, geometry), whole)


@pytest.mark.parametrize(  # few and many pixels of a column together
    ("kernel", "channels", "batch"),
    [
        *(((3, 3), channels, batch) for channels, batch in [(1, 1), (3, 2), (8, 40), (16, 1), (33, 2)]),
        ((1, 1), 1, 2), ((1, 3), 8, 40), ((2, 1), 16, 1), ((3, 2), 1, 2), ((5, 5), 8, 40), ((7, 7), 16, 1),
        ((3, 1), 8, 40), ((2, 2), 16, 1), ((2, 4), 1, 2), ((4, 1), 8, 40), ((3, 5), 16, 1),
    ],
)  # fmt: skip
def test_stride_1_forms_equal_im2col_at_any_size_and_padding(kernel, channels, batch):
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
        for layout in (images, images.to(memory_format=CHANNELS_LAST)):
            close(by_displacement(layout, kernel, padding), plain)
            close(by_spectrum(layout, kernel, padding), plain)


@pytest.mark.parametrize(
    ("channels", "batch", "size"), [(8, 128, (32, 32)), (16, 1, (7, 12)), (40, 2, (8, 8))]
)
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
    [(32, (7, 7), (3, 3)), (64, (8, 8), (2, 3)), (64, (9, 14), (1, 3)), (32, (16, 16), (5, 5))],
)
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


def test_what_is_not_finite_reaches_the_diagonal_by_spectrum_too():
    images = torch.randn(4, 8, 8, 8)
    images[1, 5, 3, 2] = torch.inf
    total = by_spectrum(images, (3, 3), (1, 1, 1, 1))
    assert not total.diagonal().view(8, 9)[5].isfinite().any()
    assert total.diagonal().view(8, 9)[[0, 1, 2, 3, 4, 6, 7]].isfinite().all()


@pytest.mark.parametrize(
    ("shape", "kernel", "dtype", "form"),
    [
        ((128, 64, 8, 8), (3, 3), torch.float32, "by_spectrum"),
        ((128, 64, 8, 8), (3, 3), torch.float64, "by_spectrum"),
        ((128, 64, 8, 8), (3, 3), torch.bfloat16, "by_displacement"),  # could not hold a spectrum
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
        real = getattr(convolution, name)
        monkeypatch.setattr(
            convolution, name, lambda *operands, name=name, real=real: called.append(name) or real(*operands)
        )
    patch_gram(torch.zeros(shape, dtype=dtype), Geometry(kernel, padding=(1, 1, 1, 1)))
    assert called == [form]


def test_multiplications_by_displacement_count_pixels_that_have_partners():
    pairs = sum((8 - down) * (8 - abs(right)) for down in range(3) for right in range(-2, 3))
    assert multiplications(torch.Size((128, 64, 8, 8)), (3, 3))[1] == 128 * 64**2 * pairs


def test_spectra_of_the_cpu_ignore_the_default_device():
    convolution._tables.cache_clear()
    with torch.device("meta"):
        correlation = correlate(torch.ones(2, 16, 8, 8, device="cpu"), (3, 3))
    torch.testing.assert_close(correlation[1, 2], torch.full((16, 16), 2.0 * 7 * 8))


@pytest.mark.parametrize("kernel", [(4, 4), (5, 2), (8, 8)])
def test_windows_that_do_not_overlap_equal_im2col(kernel):
    """As those that cut images into patches for a transformer; one leaves pixels between them out."""
    images = torch.randn(3, 4, 19, 17, dtype=torch.float64)
    for groups, stride in product((1, 2), (kernel, (kernel[0] + 1, kernel[1] + 2))):
        geometry = Geometry(kernel, stride, groups=groups, padding=(1, 0, 0, 2))
        close(patch_gram(images, geometry), im2col(images, geometry))


@pytest.mark.parametrize(  # narrow, between, and wide
    ("channels", "stride", "elements"),
    [(3, 1, 1), (12, 2, 5000), (90, 3, 1), (90, 1, 5000), (12, 1, 1 << 24)],
)
def test_a_batch_taken_in_parts_equals_im2col(monkeypatch, elements, channels, stride):
    monkeypatch.setattr(convolution, "_BUFFER_ELEMENTS", elements)
    images = torch.randn(7, channels, 9, 11, dtype=torch.float64)
    geometry = Geometry((3, 3), (stride, stride), padding=(1, 1, 1, 1))
    for layout in (images, images.to(memory_format=CHANNELS_LAST)):
        close(by_row_shift(layout, geometry), im2col(images, geometry))


@pytest.mark.parametrize(
    ("channels", "groups", "size"), [(6, 1, (2, 3)), (6, 2, (8, 9)), (256, 2, (2, 3)), (262, 1, (8, 9))]
)
def test_pixels_in_any_layout_are_summed_alike(groups, channels, size):
    images = torch.randn(30, channels, *size, dtype=torch.float64)
    plain = torch.einsum("bgcp,bgdp->gcd", *2 * [images.flatten(2).unflatten(1, (groups, -1))])
    for layout in (images, images.to(memory_format=CHANNELS_LAST)):
        close(dense(pixel_gram(layout, groups)), plain)


@pytest.mark.parametrize(
    ("batch", "channels", "groups", "size", "stride"),
    [(128, 1, 1, 64, 1), (128, 2, 1, 48, 2), (512, 3, 1, 32, 1), (128, 11, 1, 33, 2), (128, 4, 4, 32, 1)],
)
def test_thin_products_of_many_pixels_are_as_exact(batch, channels, groups, size, stride):
    """Where a BLAS adds up one row after another, an error grows with their number: MKL on AMD, to 5e-5."""
    images = torch.randn(batch, channels, size, size, generator=torch.Generator().manual_seed(0)).relu()
    geometry = Geometry((3, 3), (stride, stride), padding=(1, 1, 1, 1), groups=groups)
    exact_patches = im2col(images.double(), geometry)
    exact_pixels = dense(pixel_gram(images.double(), groups))
    for layout in (images, images.to(memory_format=CHANNELS_LAST)):
        assert ((patch_gram(layout, geometry) - exact_patches).abs() <= 2e-6 * exact_patches.abs()).all()
        pixels = dense(pixel_gram(layout, groups))
        assert ((pixels - exact_pixels).abs() <= 2e-6 * exact_pixels.abs()).all()


def pixels_of(window):
    return set(product(*(range(part.start, part.stop) for part in window)))


def execute(plan):
    """For each number the pairs of pixels (p, partner) that its sum is over, one found after another."""
    found = {}
    for number, here, there in plan.products:
        found[number] = set(zip(sorted(pixels_of(here)), sorted(pixels_of(there)), strict=True))
    for number, parts in plan.additions:
        assert sum(len(found[part]) for part in parts) == len(set().union(*(found[part] for part in parts)))
        found[number] = set().union(*(found[part] for part in parts))
    for number, other in plan.mirrors:
        found[number] = {(partner, p) for p, partner in found[other]}
    return found


@pytest.mark.parametrize(
    ("kernel", "padding", "size"),
    [
        ((1, 1), (1, 1, 1, 1), (5, 5)), ((1, 3), (2, 0, 3, 1), (6, 9)), ((3, 1), (7, 0, 0, 8), (5, 5)),
        ((2, 2), (0, 0, 0, 0), (6, 9)), ((3, 3), (1, 1, 1, 1), (6, 9)), ((3, 3), (7, 0, 0, 8), (5, 5)),
        ((5, 5), (0, 0, 0, 0), (5, 5)), ((5, 5), (2, 0, 3, 1), (6, 9)), ((2, 4), (7, 0, 0, 8), (6, 9)),
    ],
)  # fmt: skip
def test_each_pair_of_taps_sums_the_pixels_that_both_visit(size, kernel, padding):
    left, right, top, bottom = padding
    plan = plan_tap_sums(size, kernel, padding)
    found = execute(plan)
    places = [
        (y - top, x - left)
        for y in range(size[0] + top + bottom - kernel[0] + 1)
        for x in range(size[1] + left + right - kernel[1] + 1)
    ]
    image = pixels_of((slice(0, size[0]), slice(0, size[1])))
    taps = list(product(range(kernel[0]), range(kernel[1])))
    for ((y, x), (y2, x2)), number in zip(product(taps, taps), plan.of_taps, strict=True):
        visited = {((row + y, column + x), (row + y2, column + x2)) for row, column in places}
        assert found[number] == {(p, q) for p, q in visited if p in image and q in image}


def test_a_3x3_kernel_takes_13_products_and_16_of_edges():
    plan = plan_tap_sums((8, 8), (3, 3), (1, 1, 1, 1))
    areas = [len(pixels_of(here)) for _, here, _ in plan.products]
    assert (len([area for area in areas if area > 8]), len([area for area in areas if area <= 8])) == (13, 16)
    assert plan.wanted == 49
