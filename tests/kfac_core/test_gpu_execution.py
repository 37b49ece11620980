"""Promise: what K-FAC runs on a GPU gives a CPU's numbers, in few launches and without waiting.

The numbers are those of a CPU that runs the same operators; launches, waits and memory are counted on a
device without data (`fake_cuda`), in a process of its own, which needs g++.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig, device_grams
from kfac_core.collectives import communicator as alike
from kfac_core.config import Execution
from kfac_core.convolution import Geometry, patch_rows
from kfac_core.device_grams import DeviceGrams
from kfac_core.errors import ConfigError
from kfac_core.gradients import Copies
from kfac_core.packing import pack, pack_whole, packed_size
from kfac_core.second_order import deferred_status
from kfac_core.solvers import LinAlgError
from kfac_core.solvers.eigen import EigenSolver, decomposed
from tests.kfac_core.nets import ConvNet, Transformer
from tests.kfac_core.runs import assert_same, run


def trained(kind: str, execution: Execution, *, channels_last: bool = False, **options: Any) -> Tensor:
    """All parameters after three steps."""
    torch.manual_seed(1)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    model: nn.Module = ConvNet(24, 8) if kind == "conv" else Transformer(30, 16)
    model = model.double().to(memory_format=layout)
    config = KFACConfig.sc20(
        **{"factor_update_steps": 1, "inverse_update_steps": 2, "damping": 0.1} | options
    )
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


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("transformer", {"solver": "inverse"}), ("conv", {"solver": "inverse_pi", "factor_start": "first"}),
        ("transformer", {"kl_clip": None, "factor_batch_fraction": 0.5}), ("transformer", {"eigen_rank": 8}),
        ("conv", {"eigen_rank": 8, "eigen_start": "warm", "factor_start": "first"}),
        ("conv", {"factor_batch_fraction": 0.5}), ("conv", {"channels_last": True}),
        ("transformer", {"eigen_start": "warm", "inverse_update_steps": 1, "factor_start": "mean"}),
        ("conv", {"inverse_dtype": "float64", "factor_dtype": "float64"}), ("transformer", {}),
    ],
)  # fmt: skip
def test_training_equals_that_of_a_cpu(kind, options):
    want, got = (trained(kind, execution, **options) for execution in Execution)
    exact = (
        options.get("eigen_start") != "warm"
    )  # a refined basis depends on the first, arbitrary where values agree
    assert (got - want).norm() <= (1e-6 if exact else 1e-4) * want.norm()


def test_factors_too_large_to_be_decomposed_together_are_solved_one_by_one(monkeypatch):
    want = trained("transformer", Execution.BATCHED)
    monkeypatch.setattr("kfac_core.second_order._ELEMENTS", 1)
    assert (trained("transformer", Execution.BATCHED) - want).norm() <= 1e-6 * want.norm()


@pytest.mark.parametrize("rank", [None, 8])
@pytest.mark.parametrize("fault", ["not orthonormal", "of another matrix"])
def test_wrong_vectors_of_a_batched_decomposition_are_solved_again_one_by_one(monkeypatch, fault, rank):
    """Some versions of cuSOLVER and rocSOLVER return them without an error."""
    calls = []

    def faulty(factor: Tensor, out: Any = None) -> tuple[Tensor, Tensor]:
        values, vectors = decomposed(factor, out)
        calls.append(len(factor))
        if len(factor) > 1:
            vectors[1] = vectors[1, :, :1] if fault == "not orthonormal" else torch.eye(len(vectors[1]))
        return values, vectors

    want = trained("transformer", Execution.BATCHED, factor_start="first", eigen_rank=rank)
    monkeypatch.setattr("kfac_core.solvers.eigen.decomposed", faulty)
    got = trained("transformer", Execution.BATCHED, factor_start="first", eigen_rank=rank)
    assert max(calls) > 1
    assert calls.count(1) > 0
    assert (got - want).norm() <= 1e-6 * want.norm()


def test_a_statistic_that_is_not_finite_changes_no_factor_and_is_reported():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    config = KFACConfig.sc20(factor_update_steps=1, inverse_update_steps=2)
    kfac = KFAC(model, config, lr=0.1, execution=Execution.BATCHED)
    with pytest.warns(RuntimeWarning, match="gradients that are not finite in 1"):
        for x in (torch.randn(8, 4), torch.full((8, 4), float("inf"))):
            model.zero_grad()
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
    config = KFACConfig.sc20(factor_update_steps=1, inverse_update_steps=1, factor_decay=0.5)
    kfac = KFAC(model, config, lr=0.1, execution=Execution.BATCHED)
    model(torch.randn(8, 4)).square().mean().backward()
    kfac.step()
    model.zero_grad()
    before = kfac._second_order.data[0, "a"].clone()
    kfac._factors.running[0, "a"].fill_(float("nan"))  # LAPACK leaves out what follows it in a call
    model(torch.randn(8, 4)).square().mean().backward()
    with pytest.warns(RuntimeWarning, match="A factor of layer 0"):
        kfac.step()
    assert torch.equal(kfac._second_order.data[0, "a"], before)
    for key, factor in kfac._factors.running.items():
        if key != (0, "a"):
            data = kfac._second_order.data[key]
            rows, values = data[:16].view(4, 4), data[16:]
            torch.testing.assert_close(rows.mT @ torch.diag(values) @ rows, factor[0])


@pytest.mark.parametrize(
    ("piece", "layout"), [(1 << 26, torch.contiguous_format), (3000, torch.channels_last)]
)
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
        DeviceGrams(torch.float32, precision).of_rows(rows)[0] for precision in ("ieee", "bfloat16")
    )
    assert (plain - exact).norm() < 1e-6 * exact.norm()
    assert 1e-5 * exact.norm() < (rounded - exact).norm() < 1e-3 * exact.norm()
    assert rounded.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "precision"), [("gram_precision", "bfloat16"), ("product_precision", "tf32")]
)
def test_rounded_products_are_refused_on_a_cpu(name, precision):
    with pytest.raises(ConfigError, match=f"{name}={precision} needs a GPU"):
        KFAC(nn.Linear(2, 2), KFACConfig.sc20(**{name: precision}), lr=0.1)
    KFAC(nn.Linear(2, 2), KFACConfig.sc20(**{name: "ieee"}), lr=0.1)


@pytest.mark.parametrize("n", [1, 7, 320, 321])
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
    views, gradients = ([pair[side] for pair in pairs] for side in (0, 1))
    copies = Copies(views)
    copies.read(gradients)
    for view, gradient in pairs:
        assert torch.equal(view, gradient.to(view.dtype))
    back = [torch.empty_like(gradient) for gradient in gradients]
    copies.write(back)
    for view, gradient in zip(views, back, strict=True):
        assert torch.equal(gradient, view.to(gradient.dtype))
    assert not buffer[300:].any()
    again = [torch.randn_like(each).contiguous() for each in gradients]  # another layout, one without
    copies.read([None, *again[1:]])
    assert not views[0].any()
    for view, gradient in zip(views[1:], again[1:], strict=True):
        assert torch.equal(view, gradient.to(view.dtype))


def broken(count: int, *places: int) -> torch.Tensor:
    matrices = torch.eye(3).repeat(count, 1, 1)
    matrices[list(places)] = float("nan")
    return matrices


def test_statuses_are_kept_and_nothing_is_raised():
    with deferred_status(torch.empty(0)) as statuses:
        torch.linalg.eigh(broken(4, 1))
        torch.linalg.eigh(broken(1))
    assert [(status != 0).flatten().tolist() for status in statuses] == [[False, True, False, False], [False]]


def test_decompositions_raise_again_after_the_block_and_after_an_error_in_it():
    with deferred_status(torch.empty(0)):
        pass
    with pytest.raises(LinAlgError):
        torch.linalg.eigh(broken(1, 0))
    with pytest.raises(ZeroDivisionError), deferred_status(torch.empty(0)):
        raise ZeroDivisionError
    with pytest.raises(LinAlgError):
        torch.linalg.eigh(broken(1, 0))


def test_another_thread_is_told_at_once():
    raised: list[Exception] = []

    def decompose() -> None:
        torch.linalg.eigh(broken(1))
        try:
            torch.linalg.eigh(broken(2, 1))
        except LinAlgError as error:
            raised.append(error)

    with deferred_status(torch.empty(0)) as statuses:
        thread = threading.Thread(target=decompose)
        thread.start()
        thread.join()
    assert statuses == []
    assert "linalg.eigh" in str(raised[0])


def test_without_the_operator_decompositions_raise(monkeypatch):
    monkeypatch.setattr("kfac_core.second_order._OPERATOR", "_no_such_operator")
    with deferred_status(torch.empty(0)) as statuses, pytest.raises(LinAlgError):
        torch.linalg.eigh(broken(1, 0))
    assert statuses == []


def trained_on_unlike_devices(
    rank: int, world_size: int, strategy: str, kinds: list[str], execution: Execution
) -> dict[str, Tensor]:
    """Gradients of the third step in a world whose last rank decomposes with another rounding."""
    real_kind, real = alike.kind_of, (EigenSolver.solve, EigenSolver.solve_all)

    def solve(
        self: EigenSolver, factor: Tensor, damping: Any, out: Tensor, last: Tensor | None = None
    ) -> None:
        real[0](self, factor, damping, out, last)
        out.mul_(1 + 1e-5 * rank)

    def solve_all(self: EigenSolver, *arguments: Any) -> Any:
        parts, failed = real[1](self, *arguments)
        return [part * (1 + 1e-5 * rank) for part in parts], failed

    alike.kind_of = lambda device: kinds[rank]
    EigenSolver.solve, EigenSolver.solve_all = solve, solve_all
    try:
        options = {"strategy": strategy, "factor_update_steps": 1, "inverse_update_steps": 1}
        return run(rank, world_size, "conv", options, 3, execution)[0][-1]
    finally:
        alike.kind_of = real_kind
        EigenSolver.solve, EigenSolver.solve_all = real


@pytest.mark.parametrize(
    ("strategy", "execution"), [("d_kfac", Execution.SEQUENTIAL), ("spd_kfac", Execution.BATCHED)]
)
def test_models_stay_equal_on_unlike_devices(world, strategy, execution):
    first, second = world(2).run(trained_on_unlike_devices, strategy, ["H100", "A100"], execution)
    assert_same(second, first, 0)


def test_without_the_exchange_they_would_not(world):
    first, second = world(2).run(trained_on_unlike_devices, "d_kfac", ["H100", "H100"], Execution.SEQUENTIAL)
    assert not all(torch.equal(second[name], gradient) for name, gradient in first.items())


counts = pytest.mark.skipif(shutil.which("g++") is None, reason="compiles a CUDA device without data")
Step = dict[str, Any]
EVERY: dict[str, dict[str, Any]] = {
    "conv": {"model": "conv", "batch": 8},
    "channels last": {"model": "conv", "batch": 8, "channels_last": True},
    "ieee, tf32 elsewhere": {
        "model": "conv", "batch": 8, "tf32": True,
        "config": {"gram_precision": "ieee", "product_precision": "ieee"},
    },
    "transformer": {"model": "transformer", "batch": 8},
    "inverse, rank 3 of 8": {
        "model": "transformer", "batch": 8, "world_size": 8, "rank": 3, "config": {"solver": "inverse_pi"},
    },
    "overlap, bfloat16": {
        "model": "transformer", "batch": 8, "world_size": 8, "rank": 3, "autocast": "bfloat16",
        "config": {"overlap_factors": True, "gram_precision": "bfloat16"},
    },
    "scaler": {"model": "conv", "batch": 8, "scaler": True, "autocast": "float16"},
    "the defaults": {
        "model": "transformer", "batch": 8,
        "config": {"factor_start": "mean", "damping": None, "relative_damping": 0.3, "kl_clip": None,
                   "grafting": True},
    },
}  # fmt: skip


def measured(cases: list[dict[str, Any]]) -> list[dict[str, Step]]:
    """Counts of every case by kind of step."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.kfac_core.fake_cuda.measure"],
        input=json.dumps(cases), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return [{step["step"]: step for step in steps} for steps in json.loads(ran.stdout)]


@pytest.fixture(scope="module")
def small() -> dict[str, dict[str, Step]]:
    return dict(zip(EVERY, measured(list(EVERY.values())), strict=True))


@counts
@pytest.mark.ranks
@pytest.mark.parametrize("case", EVERY)
def test_an_inverse_step_waits_once_and_other_steps_never(small, case):
    assert small[case]["plain"]["waits"] == small[case]["factors"]["waits"] == {}
    assert sum(small[case]["all"]["waits"].values()) == sum(small[case]["refined"]["waits"].values()) == 1


@counts
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("case", "plain", "factors", "gemms"),
    [
        ("conv", 87, 286, 48),
        ("channels last", 87, 282, 48),
        ("transformer", 61, 154, 33),
        ("overlap, bfloat16", 61, 240, 33),
        ("the defaults", 67, 188, 33),
    ],
)
def test_a_step_launches_no_more_than_today(small, case, plain, factors, gemms):
    assert small[case]["plain"]["launches"] <= plain
    assert small[case]["factors"]["launches"] <= factors
    assert small[case]["factors"]["gemms"] <= gemms


@counts
@pytest.mark.ranks
def test_products_use_tf32_where_kfac_chooses_it(small):
    """Whatever torch is set to; decompositions never."""
    exact, chosen = small["ieee, tf32 elsewhere"], small["channels last"]
    for step in exact.values():
        assert step["tf32"] == 0
        assert step["gemms"] > 0
    assert chosen["all"]["tf32"] < chosen["factors"]["tf32"] == chosen["factors"]["gemms"]
    assert chosen["plain"]["tf32"] == chosen["plain"]["gemms"]
    assert chosen["refined"]["tf32"] < chosen["refined"]["gemms"]


@counts
@pytest.mark.slow
@pytest.mark.ranks
def test_resnet50_meets_its_targets():
    plain_waits, plain, factors = 0, 150, 1200
    (steps,) = measured([{"model": "resnet50", "batch": 32}])
    assert sum(steps["plain"]["waits"].values()) == sum(steps["factors"]["waits"].values()) == plain_waits
    assert steps["plain"]["launches"] <= plain
    assert steps["factors"]["launches"] <= factors
    assert max(steps["plain"]["transient_mb"], steps["factors"]["transient_mb"]) <= 300
