"""Promise: over MPI, K-FAC and DDP compute the same results as without it.

Every world is a real MPI world under `mpiexec`; its ranks are joined by Gloo as well, which is the reference
of the collectives. The reference of K-FAC is the dense computation of `test_exactness.py`.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from kfac_core import KFAC, ConfigError, KFACConfig
from kfac_core.collectives import Communicator, connect
from kfac_core.collectives.mpi import MPICommunicator, MPIGradients, average_over_mpi, is_cuda_aware
from kfac_core.timing import Traffic
from tests.kfac_core.mpi_worlds import MPIWorld
from tests.kfac_core.nets import batch, conv_net
from tests.kfac_core.runs import LR, build, data
from tests.kfac_core.test_exactness import GLOBAL_BATCH, HYPERPARAMETERS, STEPS, reference, seen_by

EXACT = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-6, torch.int64: 0.0}


def exchange(rank: int, world_size: int, over: str, dtype: torch.dtype) -> tuple[dict[str, Tensor], Traffic]:
    """Every collective of the protocol, on uneven parts, some of them empty."""
    communicator: Communicator = MPICommunicator() if over == "mpi" else connect()
    generator = torch.Generator().manual_seed(rank)
    own = (torch.rand(1000, generator=generator) * 100).to(dtype)
    sizes = [1000 - 7 * (world_size - 1) if r == world_size - 1 else 7 * (r % 2) for r in range(world_size)]
    sizes[0] += 1000 - sum(sizes)
    everyone = tuple(range(world_size))
    results = {name: own.clone() for name in ("all_reduce", "reduce_parts", "gather_parts", "broadcast")}
    communicator.all_reduce(results["all_reduce"])
    communicator.reduce_parts(results["reduce_parts"], sizes)()
    results["reduce_parts"] = results["reduce_parts"].split(sizes)[rank]
    communicator.gather_parts(results["gather_parts"], sizes, everyone)
    communicator.broadcast(results["broadcast"], world_size - 1)
    if world_size == 4:  # the grid of two rows and two columns, made by their members alone
        for name, group in (
            ("row", (rank // 2 * 2, rank // 2 * 2 + 1)),
            ("column", (rank % 2, rank % 2 + 2)),
        ):
            results[name] = own[:10].clone()
            communicator.gather_parts(results[name], [3, 7], group)
    return results, communicator.traffic


@pytest.mark.parametrize("dtype", EXACT, ids=str)
@pytest.mark.parametrize("world_size", [1, 4])
def test_every_collective_equals_gloos_and_counts_the_same_bytes(mpi_world, world_size, dtype):
    ranks = mpi_world(world_size)
    compared = zip(ranks.run(exchange, "mpi", dtype), ranks.run(exchange, "gloo", dtype), strict=True)
    for (got, traffic), (want, gloo_traffic) in compared:
        assert got.keys() == want.keys()
        for name, value in want.items():
            tolerance = EXACT[dtype] if "reduce" in name else 0.0
            torch.testing.assert_close(got[name], value, rtol=tolerance, atol=0, msg=name)
        if world_size > 1:
            assert traffic.sent_bytes == gloo_traffic.sent_bytes
            assert traffic.calls <= gloo_traffic.calls


def test_half_precision_is_rounded_once_and_not_at_every_addition(mpi_world):
    own = [(torch.rand(1000, generator=torch.Generator().manual_seed(rank)) * 100) for rank in range(4)]
    want = sum(values.bfloat16().float() for values in own).bfloat16()
    for results, _ in mpi_world(4).run(exchange, "mpi", torch.bfloat16):
        assert torch.equal(results["all_reduce"], want)


def sum_large(rank: int, world_size: int) -> tuple[Tensor, Tensor, int]:
    """Sums that are made in pieces, uneven ones at the end; whole numbers, so that every order is exact."""
    communicator = MPICommunicator()
    own = torch.arange(5_000_001).remainder(251).float() * (rank + 1)
    summed, parts = own.clone(), own.clone()
    sizes = [3_000_000, 0, 2_000_001, *[0] * world_size][:world_size]
    sizes[-1] += len(own) - sum(sizes)
    communicator.all_reduce(summed)
    communicator.reduce_parts(parts, sizes)()
    return summed, parts.split(sizes)[rank] + own.split(sizes)[rank], sum(sizes[:rank])


def test_large_sums_are_whole_although_they_are_made_in_pieces(mpi_world):
    want = torch.arange(5_000_001).remainder(251).float() * (1 + 2 + 3)
    for summed, own, start in mpi_world(3).run(sum_large):
        assert torch.equal(summed, want)
        assert torch.equal(own, want[start : start + len(own)])


def run_kfac(rank: int, world_size: int, options: dict[str, Any]) -> tuple[list[dict[str, Tensor]], Any]:
    model, communicator = conv_net(), MPICommunicator()
    kfac = KFAC(model, KFACConfig.sc20(**options), lr=LR, communicator=communicator)
    history = []
    for step in range(STEPS):
        x, y = batch(GLOBAL_BATCH, seed=step)
        mine = slice(rank * GLOBAL_BATCH // world_size, (rank + 1) * GLOBAL_BATCH // world_size)
        model.zero_grad()
        functional.cross_entropy(model(x[mine]), y[mine]).backward()
        for parameter in model.parameters():
            communicator.all_reduce(parameter.grad)
            parameter.grad /= world_size
        kfac.step()
        history.append({name: p.grad.clone() for name, p in model.named_parameters()})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(LR * parameter.grad)
    return history, {name: layer.factor_workers for name, layer in kfac.placement.layers.items()}


@pytest.mark.parametrize(
    ("strategy", "world_size", "extra"),
    [("spd_kfac", 3, {}), ("hybrid_opt", 4, {"grad_worker_fraction": 0.5})],
)
def test_kfac_over_mpi_equals_the_dense_reference(mpi_world, strategy, world_size, extra):
    results = mpi_world(world_size).run(run_kfac, {"strategy": strategy, **HYPERPARAMETERS, **extra})
    expected = reference("eigen", seen_by(results[0][1], world_size))
    for history, _ in results:
        for got, want in zip(history, expected, strict=True):
            for name, value in want.items():
                assert (got[name] - value).norm() < 1e-8 * value.norm(), name


def count_calls(rank: int, world_size: int) -> int:
    """Collectives of one step that updates everything."""
    model, communicator = conv_net(), MPICommunicator()
    config = KFACConfig.sc20(strategy="comm_opt", factor_update_steps=1, inverse_update_steps=1)
    kfac = KFAC(model, config, lr=LR, communicator=communicator)
    x, y = batch(4, seed=rank)
    functional.cross_entropy(model(x), y).backward()
    kfac.step()
    return communicator.traffic.calls


def test_a_step_takes_one_collective_per_phase_for_any_layers(mpi_world):
    assert max(mpi_world(4).run(count_calls)) == 2  # factors; second-order data


def train_ddp(rank: int, world_size: int, over_mpi: bool, dtype: torch.dtype) -> tuple[Tensor, list[int]]:
    """Parameters after K-FAC behind DDP with tiny buckets, and calls and bytes of the hook."""
    inner = build("conv").to(dtype)
    model = DistributedDataParallel(inner, bucket_cap_mb=1e-4)
    communicator = MPICommunicator()
    if over_mpi:
        model.register_comm_hook(MPIGradients(communicator), average_over_mpi)
    kfac = KFAC(model, KFACConfig.sc20(damping=0.01, factor_update_steps=1, inverse_update_steps=2), lr=LR)
    optimizer = torch.optim.SGD(model.parameters(), LR)
    for step in range(3):
        x, y = (part[rank::world_size] for part in data("conv", step))
        optimizer.zero_grad()
        functional.cross_entropy(model(x.to(dtype)), y).backward()
        kfac.step()
        optimizer.step()
    parameters = torch.cat([p.detach().flatten() for p in inner.parameters()])
    return parameters, [communicator.traffic.calls, communicator.traffic.sent_bytes]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 2e-2)], ids=str)
def test_ddp_with_the_hook_equals_ddp_over_gloo(mpi_world, dtype, tolerance):
    ranks = mpi_world(4)
    compared = zip(ranks.run(train_ddp, True, dtype), ranks.run(train_ddp, False, dtype), strict=True)
    for (got, (calls, sent_bytes)), (want, unused) in compared:
        assert (got - want).norm() <= tolerance * want.norm()
        assert calls > 3  # several buckets a step, all of them through MPI
        assert sent_bytes == 3 * want.numel() * want.element_size()
        assert unused == [0, 0]


def errors(rank: int, world_size: int) -> list[str]:
    communicator = MPICommunicator()
    messages = []
    for attempt in (
        lambda: communicator.all_reduce(torch.ones(2, dtype=torch.complex64)),
        lambda: communicator.broadcast(torch.ones(2, 3).T, 0),
        lambda: communicator.gather_parts(torch.ones(2, device="meta"), [1, 1], (0, 1)),
    ):
        with pytest.raises(ConfigError) as raised:
            attempt()
        messages.append(str(raised.value))
    return messages


def test_tensors_that_mpi_cannot_carry_are_errors_that_say_what_it_can(mpi_world):
    for dtype, layout, device in mpi_world(2).run(errors):
        assert "cannot sum a tensor of torch.complex64; allowed: torch.float64, torch.float32" in dtype
        assert "contiguous tensors; got strides (1, 3)" in layout
        assert "cannot carry tensors on meta: MPICH" in device
        assert "use NCCL" in device


def wait_alone(rank: int, world_size: int) -> tuple[float, str]:
    communicator = MPICommunicator(timeout_seconds=0.3)
    began = time.monotonic()
    if rank == 0:
        with pytest.raises(TimeoutError) as lost:
            communicator.all_reduce(torch.ones(3))
        return time.monotonic() - began, str(lost.value)
    return 0.3, ""


@pytest.mark.ranks
def test_a_collective_without_its_peers_times_out_and_names_itself():
    with_two = MPIWorld(2)  # of its own: its request stays open
    try:
        (seconds, message), _ = with_two.run(wait_alone)
    finally:
        with_two.close()
    assert seconds >= 0.3
    assert message.startswith("all_reduce of 3 x torch.float32 over MPI: rank 0 of 2 waited 0.3 s")


def load(rank: int, world_size: int) -> tuple[list[int], float]:
    """Batches from forked workers, with collectives before, between and after them."""
    communicator, total = MPICommunicator(), torch.zeros(1)
    communicator.all_reduce(total)
    seen = []
    for loaded in DataLoader(list(range(rank, 20, world_size)), batch_size=2, num_workers=2):
        seen += loaded.tolist()
        total += len(loaded)
    communicator.all_reduce(total)
    return seen, float(total)


def test_forked_loader_workers_run_beside_mpi(mpi_world):
    results = mpi_world(2).run(load)
    assert [seen for seen, _ in results] == [list(range(0, 20, 2)), list(range(1, 20, 2))]
    assert [total for _, total in results] == [20, 20]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_tensor_needs_a_cuda_aware_library():
    communicator, tensor = MPICommunicator(), torch.full((3,), 2.0, device="cuda")
    if is_cuda_aware():
        communicator.all_reduce(tensor)
        assert tensor.tolist() == [2.0 * communicator.world_size] * 3
        return
    with pytest.raises(ConfigError, match="is not CUDA-aware"):
        communicator.all_reduce(tensor)
