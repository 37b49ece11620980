"""Promise: after a step that fails on some or all ranks, nothing is in flight and no rank is blocked."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig
from kfac_core.placement import balance as buckets
from kfac_core.placement.balance import CostModel

EVERY_STEP: dict[str, Any] = {"factor_update_steps": 1, "inverse_update_steps": 1}
SHARP = {**EVERY_STEP, "factor_decay": 0.0, "kl_clip": None}


class Net(nn.Module):
    """Three layers in buckets of their own, the second of which need not take part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor, use_b: bool) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.c(h + self.b(h) if use_b else h)


def made(options: dict[str, Any]) -> tuple[Net, KFAC]:
    before = buckets._MIN_ELEMENTS, buckets._MIN_ELEMENTS_AT_STEP, buckets._MAX_BUCKETS
    buckets._MIN_ELEMENTS, buckets._MIN_ELEMENTS_AT_STEP, buckets._MAX_BUCKETS = 1, 1, 10**6
    model = Net()
    try:
        return model, KFAC(model, KFACConfig.sc20(**options), lr=0.1)
    finally:
        buckets._MIN_ELEMENTS, buckets._MIN_ELEMENTS_AT_STEP, buckets._MAX_BUCKETS = before


def backward(
    model: Net, seed: int, rank: int, world_size: int, *, use_b: bool = True, scale: float = 1.0
) -> None:
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    model.zero_grad()
    mine = slice(rank, None, world_size)
    functional.cross_entropy(model(scale * x[mine], use_b), (torch.arange(8) % 3)[mine]).backward()
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        dist.all_reduce(weight.grad)
        weight.grad /= world_size


def stepped(model: Net, kfac: KFAC, seed: int, rank: int, world_size: int) -> list[Tensor]:
    """The factors after a step on this batch."""
    backward(model, seed, rank, world_size)
    kfac.step()
    return [factor.clone() for factor in kfac._factors.running.values()]


def fails_at(kfac: KFAC, bucket: int, at_work: str = "_pack") -> None:
    """Let packing or accumulating one bucket fail, once."""
    real, calls = getattr(kfac._factors, at_work), []

    def fails(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == bucket:
            raise KeyboardInterrupt
        return real(*args)

    setattr(kfac._factors, at_work, fails)


def factors_after_a_failure(
    rank: int, world_size: int, at: tuple[int, int], restore: bool, at_work: str
) -> tuple[list[Tensor], list[Tensor]]:
    """Factors of a batch, without and with a step before it that fails on each rank at its bucket."""
    model, kfac = made(SHARP)
    if restore:
        stepped(model, kfac, 3, rank, world_size)
    state = copy.deepcopy(kfac.state_dict())
    want = stepped(model, kfac, 1, rank, world_size)
    kfac.load_state_dict(state)
    fails_at(kfac, at[rank], at_work)
    backward(model, 2, rank, world_size, scale=3.0)
    try:
        kfac.step()
    except KeyboardInterrupt:
        held = kfac._factors
        assert not (held._in_flight or held._packed or held._unreleased or held._received)
    else:
        raise AssertionError("nothing failed")
    if restore:
        kfac.load_state_dict(state)
    return want, stepped(model, kfac, 1, rank, world_size)


def assert_alike(results: list[tuple[list[Tensor], list[Tensor]]]) -> None:
    for want, got in results:
        for one, other in zip(want, got, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("at", "restore", "at_work"),
    [
        ((1, 1), False, "_pack"), ((2, 3), False, "_pack"), ((3, 1), True, "_pack"), ((3, 3), True, "_pack"),
        ((1, 1), True, "accumulate_received"), ((2, 3), True, "accumulate_received"),
    ],
)  # fmt: skip
def test_a_failure_at_one_bucket_leaves_nothing_to_the_next_step(world, at, restore, at_work):
    assert_alike(world(2).run(factors_after_a_failure, at, restore, at_work))


def goes_on_when_one_rank_fails(rank: int, world_size: int) -> int:
    model, kfac = made({**EVERY_STEP, "inverse_update_steps": 100})
    stepped(model, kfac, 1, rank, world_size)
    if rank == 1:
        fails_at(kfac, 2)
    backward(model, 2, rank, world_size)
    try:
        kfac.step()
    except KeyboardInterrupt:
        assert rank == 1
    stepped(model, kfac, 3, rank, world_size)
    return kfac.steps


def test_a_rank_that_fails_alone_does_not_leave_its_peer_waiting(world):
    assert world(2).run(goes_on_when_one_rank_fails) == [3, 2]


def rolls_back(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    model, kfac = made({**SHARP, "overlap_factors": True})
    stepped(model, kfac, 1, rank, world_size)
    state = copy.deepcopy(kfac.state_dict())
    want = stepped(model, kfac, 2, rank, world_size)
    backward(model, 3, rank, world_size, use_b=rank == 0)  # rank 0 has sent more buckets than rank 1
    kfac.load_state_dict(state)
    return want, stepped(model, kfac, 2, rank, world_size)


def test_loading_a_state_works_while_ranks_have_sent_different_buckets(world):
    assert_alike(world(2).run(rolls_back))


def discards(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor]]:
    model, kfac = made({**SHARP, "overlap_factors": True})
    want = stepped(model, kfac, 1, rank, world_size)
    backward(model, 2, rank, world_size, scale=3.0)
    kfac.discard()
    return want, stepped(model, kfac, 1, rank, world_size)


def test_a_discarded_batch_has_no_effect(world):
    assert_alike(world(2).run(discards))


def begins_again(rank: int, world_size: int) -> list[Any]:
    """Starting the collective of the second of two ready buckets fails once."""
    placed = CostModel(inverse=lambda factor: 10.0 * factor.dim, exchange=lambda _: 45.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    config = KFACConfig.sc20(**EVERY_STEP, strategy="spd_kfac", overlap_factors=True)
    kfac = KFAC(model, config, lr=0.1, cost=placed)
    over, sent = kfac._factors._communicator, []
    assert [bucket.sizes is None for bucket in kfac._factors._buckets] == [False, True]
    real_reduce, real_sum = over.reduce_parts, over.all_reduce_async
    monkey = pytest.MonkeyPatch()
    monkey.setattr(over, "reduce_parts", lambda *args: (sent.append("parts"), real_reduce(*args))[1])

    def sums(buffer: Tensor) -> Any:
        sent.append("sum")
        if sent.count("sum") == 1:
            raise MemoryError
        return real_sum(buffer)

    monkey.setattr(over, "all_reduce_async", sums)
    x = torch.randn(8, 4, dtype=torch.float64)
    try:
        functional.cross_entropy(model(x), torch.arange(8) % 3).backward()
    except MemoryError:
        sent.append("failed")
    kfac.step()
    monkey.undo()
    return sent


def test_a_bucket_whose_collective_failed_to_start_is_sent_once(world):
    assert world(2).run(begins_again) == [["parts", "sum", "failed", "sum"]] * 2


def warned_as_errors(rank: int, world_size: int) -> tuple[int, int]:
    """How often a rank's step raised, and its failures, where only the first has a factor to fail with."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    kfac = KFAC(model, KFACConfig.sc20(strategy="mem_opt", **EVERY_STEP), lr=0.1)
    raised = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            x = torch.randn(6, 4)
            if step == 1:
                x[0, 0] = torch.nan
            model.zero_grad()
            functional.cross_entropy(model(x), torch.arange(6) % 3).backward()
            for weight in model.parameters():
                weight.grad.nan_to_num_()
                dist.all_reduce(weight.grad)
            try:
                kfac.step()
            except RuntimeWarning:
                raised += 1
    return raised, len(kfac.failures)


def test_a_warning_raised_as_an_error_blocks_no_rank_and_is_raised_once(world):
    assert world(2).run(warned_as_errors) == [(1, 2), (0, 0)]
