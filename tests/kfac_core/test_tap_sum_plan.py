"""Promise: every planned sum is over the right pixels, and edges cost no second pass over the image."""

from itertools import product

import pytest

from kfac_core.convolution import plan_tap_sums

KERNELS = [(1, 1), (1, 3), (3, 1), (2, 2), (3, 3), (5, 5), (2, 4)]


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


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("padding", [(0, 0, 0, 0), (1, 1, 1, 1), (2, 0, 3, 1), (7, 0, 0, 8)])
@pytest.mark.parametrize("size", [(5, 5), (6, 9)])
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
