"""Promise: factors sent during the backward pass equal those sent after it, bit for bit.

So do grams that are packed as soon as they are computed. The exception is factors that all ranks keep, on
three and more ranks: a ring adds them in an order that depends on their position in the buffer.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from kfac_core import KFAC, ConfigError, KFACConfig
from kfac_core.placement import FactorJob, FactorShape, placement
from kfac_core.placement import balance as buckets
from tests.kfac_core.runs import LR, average_gradients, build, data

OPTIONS: dict[str, Any] = {"damping": 0.01, "factor_update_steps": 2, "inverse_update_steps": 2}
STRATEGIES: list[dict[str, Any]] = [
    {"strategy": "comm_opt"}, {"strategy": "mem_opt"}, {"strategy": "dp_kfac"}, {"strategy": "d_kfac"},
    {"strategy": "spd_kfac"}, {"strategy": "hybrid_opt", "grad_worker_fraction": 0.5},
]  # fmt: skip


class Unusual(nn.Module):
    """A module called twice, a checkpointed one, and one whose output the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.aside, self.shared = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.kept, self.head = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.shared(torch.tanh(self.shared(x))))
        self.aside(x)
        return self.head(checkpoint(lambda v: torch.tanh(self.kept(v)), x, use_reentrant=False))


def made(net: str, options: dict[str, Any], *, overlap: bool) -> tuple[nn.Module, KFAC]:
    bare = Unusual() if net == "unusual" else build(net)  # both are fed by `data`
    model = DistributedDataParallel(bare, find_unused_parameters=net == "unusual")
    return model, KFAC(model, KFACConfig.sc20(**OPTIONS, **options, overlap_factors=overlap), lr=LR)


def gradients(
    rank: int, world_size: int, net: str, options: dict[str, Any], micro_batches: int = 1
) -> tuple[list[list[Tensor]], list[list[int]], list[int]]:
    """By step, without overlap, with it, and with grams packed early and sent at the step in several buckets.

    Also calls and bytes of each, and how many buckets were in flight when a backward pass ended.
    """
    torch.set_num_threads(1)
    usual = buckets._MIN_ELEMENTS, buckets._MIN_ELEMENTS_AT_STEP
    buckets._MIN_ELEMENTS = 1  # a bucket per tiny layer
    found: list[list[Tensor]] = []
    calls, in_flight, whole = [], [], placement.LARGEST_UNPACKED
    for overlap, placement.LARGEST_UNPACKED, buckets._MIN_ELEMENTS_AT_STEP in (
        (False, whole, usual[1]), (True, whole, usual[1]), (False, 0, 1)
    ):  # fmt: skip
        model, kfac = made(net, options, overlap=overlap)
        for step in range(3):
            x, y = (part[rank::world_size].chunk(micro_batches) for part in data(net, step))
            model.zero_grad()
            for index in range(micro_batches):
                with model.no_sync() if index < micro_batches - 1 else nullcontext():
                    functional.cross_entropy(model(x[index]), y[index]).backward()
                if overlap:
                    in_flight.append(len(kfac._factors._in_flight))
            kfac.step()
            found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        calls.append([kfac._communicator.traffic.calls, kfac._communicator.traffic.sent_bytes])
        kfac.remove()
    (buckets._MIN_ELEMENTS, buckets._MIN_ELEMENTS_AT_STEP), placement.LARGEST_UNPACKED = usual, whole
    return found, calls, in_flight


@pytest.mark.parametrize("options", STRATEGIES, ids=lambda options: options["strategy"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_strategy_computes_the_same_bits(world, world_size, options):
    for found, (before, after, packed), in_flight in world(world_size).run(gradients, "conv", options):
        by_ring = options["strategy"] in ("d_kfac", "spd_kfac")
        for late, early in zip(found[:3], found[3:6], strict=True):
            torch.testing.assert_close(
                late, early, rtol=1e-12 if by_ring else 0.0, atol=1e-15 if by_ring else 0.0
            )
        torch.testing.assert_close(found[:3], found[6:], rtol=0.0, atol=0.0)
        assert before[1] == after[1] == packed[1]  # bytes; in more calls
        if options["strategy"] == "dp_kfac":  # whose factors are not sent
            assert in_flight == [0, 0, 0]
            assert before[0] == packed[0]
        else:
            assert before[0] < packed[0] or world_size > 2  # where one bucket is sent at the step
            assert in_flight[0] >= 3  # the smallest layers share one
            assert in_flight[1] == 0  # no factors are due


def test_factors_of_accumulated_passes_are_sent_with_the_last_one(world):
    for found, _, in_flight in world(2).run(gradients, "conv", {"strategy": "mem_opt"}, 3):
        for early in (found[3:6], found[6:]):
            torch.testing.assert_close(found[:3], early, rtol=0.0, atol=0.0)
        assert in_flight[:2] == [0, 0]
        assert in_flight[2] >= 3


def test_shared_checkpointed_and_unused_layers_are_complete_before_sending(world):
    for found, _, in_flight in world(2).run(gradients, "unusual", {"strategy": "mem_opt"}):
        for early in (found[3:6], found[6:]):
            torch.testing.assert_close(found[:3], early, rtol=0.0, atol=0.0)
        assert in_flight[0] == 3  # all but the unused layer, which delays no other: it is the first


class Reentrant(nn.Module):
    """One module inside two reentrant checkpoints: at its first gradient the second is not foreseeable."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.head = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.shared, x, use_reentrant=True)
        return self.head(x)


def reentrant(rank: int, world_size: int) -> list[list[Tensor]]:
    least, buckets._MIN_ELEMENTS = buckets._MIN_ELEMENTS, 1
    found = []
    for overlap in (False, True):
        model = Reentrant()
        kfac = KFAC(model, KFACConfig.sc20(**OPTIONS, strategy="mem_opt", overlap_factors=overlap), lr=LR)
        x, y = (part[rank::world_size] for part in data("mlp", 0))
        functional.cross_entropy(model(x.requires_grad_()), y).backward()
        average_gradients(model, world_size)
        kfac.step()
        found.append([p.grad.clone() for p in model.parameters()])
        kfac.remove()
    buckets._MIN_ELEMENTS = least
    return found


def test_a_module_in_two_reentrant_checkpoints_is_sent_at_the_step(world):
    for late, early in world(2).run(reentrant):
        torch.testing.assert_close(late, early, rtol=0.0, atol=0.0)


def under_autocast(rank: int, world_size: int) -> list[list[Tensor]]:
    """Backward passes inside autocast, added up, of a layer whose few rows are kept."""
    found = []
    for overlap in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(64, 64))
        kfac = KFAC(model, KFACConfig.sc20(**OPTIONS, strategy="mem_opt", overlap_factors=overlap), lr=LR)
        x = torch.rand(2, 4, 64, generator=torch.Generator().manual_seed(rank))
        with torch.autocast("cpu", torch.bfloat16):
            with model.no_sync():
                model(x[0]).square().mean().backward()
            model(x[1]).square().mean().backward()
        kfac.step()
        found.append([factor.clone() for factor in kfac._factors.running.values()])
        kfac.remove()
    return found


def test_sums_of_passes_keep_full_precision_inside_autocast(world):
    for late, early in world(2).run(under_autocast):
        torch.testing.assert_close(late, early, rtol=1e-6, atol=1e-7)


def two_passes(rank: int, world_size: int) -> str:
    """A second backward pass before the step, without no_sync()."""
    model, kfac = made("mlp", {"strategy": "mem_opt"}, overlap=True)
    x, y = (part[rank::world_size] for part in data("mlp", 0))
    functional.cross_entropy(model(x), y).backward()
    try:
        functional.cross_entropy(model(x), y).backward()
    except ConfigError as error:
        message = str(error)
    kfac._factors.pack(kfac._capture.statistics)
    kfac._factors.exchange()  # or factors in flight would arrive in the next test
    kfac.remove()
    return message


def test_a_gradient_that_comes_too_late_is_an_error_with_a_hint(world):
    for message in world(2).run(two_passes):
        assert "overlap_factors" in message
        assert "no_sync()" in message


def overflowed(rank: int, world_size: int) -> list[Tensor]:
    """A step that overflows between two that do not: its factors were sent, and are dropped."""
    found = []
    for overlap in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(build("mlp"))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(model.parameters(), LR)
        config = KFACConfig.sc20(**OPTIONS, strategy="mem_opt", overlap_factors=overlap)
        kfac = KFAC(model, config, lr=LR, grad_scaler=scaler)
        for step in range(3):
            x, y = (part[rank::world_size] for part in data("mlp", step))
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y) * (torch.inf if step == 0 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            kfac.step()
            scaler.step(optimizer)
            scaler.update()
        assert kfac.skipped_steps == 1
        found += [torch.cat([p.detach().flatten() for p in model.parameters()])]
        kfac.remove()
    return found


def test_a_skipped_step_has_no_effect(world):
    for late, early in world(2).run(overflowed):
        assert torch.equal(late, early)


def test_buckets_hold_every_sent_factor_once_last_layers_first():
    everyone = (0, 1, 2)
    jobs = [
        FactorJob(layer, kind, FactorShape(n), everyone, (layer % 3,) if layer else everyone, everyone)
        for layer, n in enumerate((600, 900, 30, 20, 1200, 64))
        for kind in ("a", "g")
    ]
    alone = FactorJob(6, "a", FactorShape(5000), (1,), (1,), (1,))
    found = buckets.buckets([*jobs, alone], 3, overlap=True)
    held = [job for bucket in found for job in bucket.jobs]
    assert len(held) == len(jobs)
    assert set(map(id, held)) == set(map(id, jobs))
    order = [max(bucket.layers) for bucket in found]
    assert order == sorted(order, reverse=True)
    assert len(found) > 2
    for bucket in found:
        if bucket.sizes is not None:
            owners = [job.inverse_workers[0] for job in bucket.jobs]
            assert owners == sorted(owners)
            assert sum(bucket.sizes) == sum(map(buckets.sent_elements, bucket.jobs))
    assert len(buckets.buckets([*jobs, alone], 3, overlap=False)) == 2
