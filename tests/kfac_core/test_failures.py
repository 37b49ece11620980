"""Promise: no NaN or infinity reaches a factor, and every failure is reported."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kfac_core import KFAC, KFACConfig
from kfac_core.solvers import LinAlgError, eigen
from tests.kfac_core.runs import LR, build, data, solved, step

EVERY_STEP = {"factor_update_steps": 1, "inverse_update_steps": 1}


def poisoned(rank: int, world_size: int, options: dict[str, Any]) -> tuple[bool, list[str], list[str], int]:
    """The last rank's batch holds a NaN in the second of three steps."""
    model = build("mlp")
    kfac = KFAC(model, KFACConfig.sc20(**EVERY_STEP, **options), lr=LR)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(3):
            x, y = data("mlp", number)
            if number == 1:
                x[-1, 0] = torch.nan
            step(model, kfac, x, y, rank, world_size)
    finite = all(factor.isfinite().all() for factor in kfac._factors.running.values())
    finite &= all(part.isfinite().all() for part in kfac._second_order.data.values())
    texts = [str(warning.message) for warning in caught if "K-FAC" in str(warning.message)]
    spread = [text for text in texts if "gradients that are not finite in 1 of the steps" in text]
    texts = [text for text in texts if text not in spread]
    assert len(spread) == 1  # the gradients are averaged, so that every rank has the NaN
    assert all((failure.step, failure.rank) == (1, rank) for failure in kfac.failures)
    named = [f"{failure.layer}.{failure.kind}" for failure in kfac.failures]
    return bool(finite), named, texts, len(kfac._factors.own)


@pytest.mark.parametrize(("world_size", "strategy"), [(1, "comm_opt"), (2, "mem_opt"), (2, "d_kfac")])
def test_a_poisoned_batch_reaches_no_factor_and_is_reported_by_who_keeps_it(world, world_size, strategy):
    for finite, named, texts, own in world(world_size).run(poisoned, {"strategy": strategy}):
        assert finite
        assert len(named) == len(set(named)) == len(texts) == own
        assert all("at step 1 on rank" in text and "were not finite" in text for text in texts)


def test_a_float16_factor_that_would_overflow_keeps_its_value():
    model = build("mlp").float()
    kfac = KFAC(model, KFACConfig.sc20(factor_dtype="float16", factor_decay=0.0, **EVERY_STEP), lr=LR)
    x, y = data("mlp", 0)
    functional.cross_entropy(model(x.float() * 1e4), y).backward()
    with pytest.warns(RuntimeWarning, match="A factor of layer 0 at step 0 on rank 0"):
        kfac.step()
    assert torch.equal(kfac._factors.running[0, "a"][0], torch.eye(5, dtype=torch.float16))


def renew(kfac: KFAC) -> None:
    """Solve, and warn of failures, as the end of a step does."""
    kfac._update_second_order()
    kfac._warn()


def singular(solver: str = "inverse", value: float = 1e8) -> KFAC:
    """A KFAC in float32 whose first factor is all one value: far from definite in float32."""
    kfac = KFAC(build("mlp").float(), KFACConfig.sc20(solver=solver, damping=1.0, **EVERY_STEP), lr=LR)
    kfac._factors.running[0, "a"].fill_(value)
    return kfac


def test_what_float32_cannot_factor_is_solved_in_float64():
    kfac = singular()
    with pytest.raises(LinAlgError):
        solved(KFACConfig.sc20(solver="inverse"), kfac._factors.running[0, "a"], 1.0)
    kfac._update_second_order()
    assert kfac.failures == []
    want = torch.linalg.inv(torch.full((5, 5), 1e8, dtype=torch.float64) + torch.eye(5, dtype=torch.float64))
    torch.testing.assert_close(kfac._second_order.data[0, "a"].view(5, 5), want.float(), rtol=1e-4, atol=1e-6)


NO_STATISTICS = pytest.mark.filterwarnings("ignore:K-FAC. no statistics")  # these tests set factors


@NO_STATISTICS
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_a_factor_without_decomposition_leaves_the_last_good_data_in_use(solver):
    kfac = singular(solver, value=1.0)
    kfac._update_second_order()
    good = kfac._second_order.data[0, "a"].clone()
    kfac._factors.running[0, "a"].fill_(torch.nan)
    with pytest.warns(RuntimeWarning, match="A factor of layer 0 at step 0 on rank 0: no decomposition"):
        renew(kfac)
    assert torch.equal(kfac._second_order.data[0, "a"], good)
    (failure,) = kfac.failures
    assert (failure.layer, failure.kind, failure.step, failure.rank) == ("0", "a", 0, 0)


@NO_STATISTICS
@pytest.mark.parametrize(("solver", "silent"), [("eigen", True), ("inverse", False)])
def test_a_failing_solver_overwrites_no_good_data(solver, silent, monkeypatch):
    kfac = singular(solver, value=1.0)
    kfac._update_second_order()
    good = kfac._second_order._buffer.clone()
    real = type(kfac._second_order._solver).solve

    def fails(self: Any, factor: Tensor, damping: float, out: Tensor, last: Tensor | None = None) -> None:
        real(self, factor, damping, out, last)
        out[out.numel() // 3] = torch.nan if silent else 7.0
        if not silent:
            raise LinAlgError("half done")

    monkeypatch.setattr(type(kfac._second_order._solver), "solve", fails)
    reason = "the result is not finite" if silent else "half done"
    with pytest.warns(RuntimeWarning, match=f"no decomposition, also in float64: {reason}"):
        renew(kfac)
    assert torch.equal(kfac._second_order._buffer, good)
    assert len(kfac.failures) == len(kfac._second_order.own)


@pytest.mark.parametrize("values", [True, False])
def test_a_decomposition_with_one_nan_in_one_block_is_made_again_in_float64(values, monkeypatch):
    kfac = KFAC(torch.nn.Conv2d(8, 8, 3, groups=4), KFACConfig.sc20(**EVERY_STEP), lr=LR)
    kfac._factors.running[0, "a"].add_(torch.rand(4, 19, 19)).add_(kfac._factors.running[0, "a"].mT.clone())
    kfac._update_second_order()
    good, real = kfac._second_order._buffer.clone(), eigen.decomposed

    def silent(factor: Tensor, out: tuple[Tensor, Tensor]) -> None:
        real(factor, out)
        if factor.dtype == torch.float32:
            (out[0][-2, -1:] if values else out[1][-2, -1, -1:]).fill_(torch.nan)

    kfac._second_order._buffer.zero_()
    monkeypatch.setattr(eigen, "decomposed", silent)
    kfac._update_second_order()
    assert kfac.failures == []
    assert kfac._second_order._buffer.isfinite().all()
    torch.testing.assert_close(kfac._second_order._buffer.abs(), good.abs(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("solver", ["eigen", "inverse", "inverse_pi"])
def test_a_factor_that_never_had_good_data_counts_as_the_identity(solver):
    kfac = singular(solver, value=torch.nan)
    untouched = KFAC(build("mlp").float(), kfac.config, lr=LR)
    untouched._update_second_order()
    with pytest.warns(RuntimeWarning, match="no decomposition"):
        renew(kfac)
    for key, want in untouched._second_order.data.items():
        assert torch.equal(kfac._second_order.data[key], want)
