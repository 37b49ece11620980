"""Promise: what K-FAC runs on a GPU gives, on a CPU, the numbers of what it runs there."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig, device_grams
from kfac_core.config import Execution
from kfac_core.convolution import Geometry, patch_rows
from kfac_core.device_grams import DeviceGrams
from kfac_core.errors import ConfigError
from kfac_core.gradients import copy_together
from kfac_core.packing import pack, pack_whole, packed_size
from tests.kfac_core.nets import ConvNet, Transformer


def trained(kind: str, execution: Execution, *, channels_last: bool = False, **options: Any) -> Tensor:
    """All parameters after three steps."""
    torch.manual_seed(1)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model: nn.Module = ConvNet(24, 8) if kind == "conv" else Transformer(30, 16)
    model = model.double().to(memory_format=layout)
    config = KFACConfig(**{"factor_update_steps": 1, "inverse_update_steps": 2, "damping": 0.1} | options)
    kfac = KFAC(model, config, lr=0.1, execution=execution)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(3):
        if kind == "conv":
            x = torch.randn(4, 3, 12, 12, dtype=torch.float64).contiguous(memory_format=layout)
        else:
            x = torch.randint(0, 30, (4, 8))
        optimizer.zero_grad()
        outputs = model(x).flatten(0, -2)
        functional.cross_entropy(outputs, torch.arange(len(outputs)) % 10).backward()
        kfac.step()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("kind", ["conv", "transformer"])
@pytest.mark.parametrize(
    "options",
    [
        {"solver": "inverse"},
        {"solver": "inverse_pi"},
        {"factor_start": "first"},
        {"kl_clip": None},
        {"eigen_rank": 8},
        {"eigen_rank": 8, "eigen_start": "warm", "factor_start": "first"},
        {"factor_batch_fraction": 0.5},
        {"inverse_dtype": "float64", "factor_dtype": "float64"},
        {"channels_last": True},
    ],
)
def test_training_equals_that_of_a_cpu(kind, options):
    options = {name: value for name, value in options.items() if kind == "conv" or name != "channels_last"}
    want, got = (trained(kind, execution, **options) for execution in Execution)
    assert (got - want).norm() <= 1e-6 * want.norm()


def test_a_statistic_that_is_not_finite_changes_no_factor_and_is_reported():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = KFACConfig(factor_update_steps=1, inverse_update_steps=2)
    kfac = KFAC(model, config, lr=0.1, execution=Execution.BATCHED)
    for x in (torch.randn(8, 4), torch.full((8, 4), float("inf"))):
        model(x).square().mean().backward()
        before = {key: factor.clone() for key, factor in kfac._factors.running.items()}
        kfac.step()
    for key, factor in kfac._factors.running.items():
        assert torch.equal(factor, before[key])
    model.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="1 updates were not finite"):
        kfac.step()


def test_a_factor_without_decomposition_keeps_its_data_and_its_neighbours_are_solved():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    config = KFACConfig(factor_update_steps=1, inverse_update_steps=1, factor_decay=0.5)
    kfac = KFAC(model, config, lr=0.1, execution=Execution.BATCHED)
    model(torch.randn(8, 4)).square().mean().backward()
    kfac.step()
    before = {key: data.clone() for key, data in kfac._second_order.data.items()}
    kfac._factors.running[1, "a"].fill_(float("nan"))
    model(torch.randn(8, 4)).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="A factor of layer 1"):
        kfac.step()
    changed = {key for key, data in kfac._second_order.data.items() if not torch.equal(data, before[key])}
    assert changed == before.keys() - {(1, "a")}


@pytest.mark.parametrize("piece", [1 << 26, 3000])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_grams_of_patches_equal_their_product(monkeypatch, piece, layout):
    monkeypatch.setattr(device_grams, "_PIECE_ELEMENTS", piece)
    grams = DeviceGrams(torch.float64)
    images = torch.randn(5, 8, 12, 11, dtype=torch.float64).contiguous(memory_format=layout)
    for groups, kernel, stride, dilation, padding in itertools.product(
        (1, 2), ((1, 1), (3, 2)), ((1, 1), (2, 3)), ((1, 1), (2, 1)), ((0, 0, 0, 0), (1, 2, 0, 1))
    ):
        geometry = Geometry(kernel, stride, dilation, groups, padding)
        rows = patch_rows(images, geometry)
        extended = torch.cat([rows, rows.new_ones(*rows.shape[:2], 1)], -1)
        torch.testing.assert_close(grams.of_patches(images, geometry), rows.mT @ rows)
        torch.testing.assert_close(grams.of_patches(images, geometry, with_ones=True), extended.mT @ extended)
    for groups in (1, 2):
        rows = patch_rows(images, Geometry((1, 1), groups=groups))
        torch.testing.assert_close(grams.of_pixels(images, groups), rows.mT @ rows)


def test_bfloat16_rounds_operands_and_adds_up_in_float32():
    rows = torch.randn(4096, 64)
    exact = rows.double().mT @ rows.double()
    plain, rounded = (
        DeviceGrams(torch.float32, precision).of_rows(rows)[0] for precision in (None, "bfloat16")
    )
    assert (plain - exact).norm() < 1e-6 * exact.norm()
    assert 1e-5 * exact.norm() < (rounded - exact).norm() < 1e-3 * exact.norm()
    assert rounded.dtype == torch.float32


def test_a_gram_precision_is_refused_on_a_cpu():
    with pytest.raises(ConfigError, match="gram_precision=bfloat16 needs a GPU"):
        KFAC(nn.Linear(2, 2), KFACConfig(gram_precision="bfloat16"), lr=0.1)


@pytest.mark.parametrize("n", [1, 2, 7, 320, 321, 322])
def test_a_whole_triangle_is_packed_as_in_strips(n):
    matrices = torch.randn(2, n, n, dtype=torch.float64)
    matrices = matrices + matrices.mT
    want, got = (torch.empty(2, packed_size(n), dtype=torch.float64) for _ in range(2))
    pack(matrices, want)
    pack_whole(matrices, got)
    assert torch.equal(got, want)


def test_copies_of_every_layout_arrive():
    torch.manual_seed(0)
    buffer = torch.zeros(400)
    spaced = buffer[:60].view(3, 4, 5)
    pairs = [(each[:, :-1], torch.randn(4, 4)) for each in spaced]  # rows with a gap
    pairs += [(each[:, -1], torch.randn(4)) for each in spaced]
    kernels = buffer[60:276].view(2, 3, 4, 3, 3)
    pairs += [
        (each, torch.randn(3, 4, 3, 3).contiguous(memory_format=torch.channels_last)) for each in kernels
    ]
    pairs += [(buffer[280:290], torch.randn(10)), (buffer[290:300], torch.randn(10).double())]
    copy_together(pairs)
    for target, source in pairs:
        assert torch.equal(target, source.to(target.dtype))
    backward = [(torch.empty_like(source), target) for target, source in pairs]
    copy_together(backward)
    for target, source in backward:
        assert torch.equal(target, source.to(target.dtype))
    assert not buffer[300:].any()


def test_factors_after_one_without_decomposition_in_the_same_call_are_solved_again():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    config = KFACConfig(factor_update_steps=1, inverse_update_steps=1, factor_decay=0.5)
    kfac = KFAC(model, config, lr=0.1, execution=Execution.BATCHED)
    model(torch.randn(8, 4)).square().mean().backward()
    kfac._factors.running[0, "a"].fill_(float("nan"))  # LAPACK leaves out what follows it
    with pytest.warns(RuntimeWarning, match="A factor of layer 0"):
        kfac.step()
    for key, factor in kfac._factors.running.items():
        if key == (0, "a"):
            continue
        data = kfac._second_order.data[key]
        rows, values = data[:16].view(4, 4), data[16:]
        torch.testing.assert_close(rows.mT @ torch.diag(values) @ rows, factor[0])
