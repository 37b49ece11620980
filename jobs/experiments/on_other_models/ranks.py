"""Wrappers that need ranks: two processes of Gloo, whose time-out is short."""

from __future__ import annotations

import multiprocessing as mp
import tempfile
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from jobs.experiments.on_other_models.mistakes import backward, net
from kfac_core import KFAC, KFACConfig

TIMEOUT = timedelta(seconds=10)


def answers() -> Iterator[tuple[str, str]]:
    """One a wrapper; a rank's error is its answer."""
    cases: dict[str, Callable[[], str]] = {
        "FSDP2: two of three Linears sharded": some_sharded, "FSDP2: every block and the root": all_sharded,
        "FSDP2: the same, run once before": sharded_and_run, "FSDP1": fsdp1,
        "DDP join, ranks with 1 and 2 batches": joined,
    }  # fmt: skip
    for question, case in cases.items():
        yield question, _on_two_ranks(case)


def _on_two_ranks(case: Callable[[], str]) -> str:
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        queue: Any = context.Queue()
        store = str(Path(folder) / "store")
        processes = [context.Process(target=_rank, args=(rank, store, case, queue)) for rank in range(2)]
        for process in processes:
            process.start()
        found = sorted(queue.get(timeout=120) for _ in processes)
        for process in processes:
            process.join(20)
            process.kill()
    return " | ".join(dict.fromkeys(text for _, text in found))


def _rank(rank: int, store: str, case: Callable[[], str], queue: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    files = dist.FileStore(store, 2)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=2, timeout=TIMEOUT)
    try:
        said = case()
    except BaseException as error:
        said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else '(no text)'}"[:160]
    queue.put((rank, said))


def _step(model: nn.Module) -> str:
    config = KFACConfig(kl_clip=None, factor_update_steps=1, inverse_update_steps=1)
    kfac = KFAC(model, config, lr=0.1)
    backward(model)
    before = [_whole(p.grad) for p in model.parameters()]
    kfac.step()
    after = [_whole(p.grad) for p in model.parameters()]
    taken = sum(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    return f"{taken} of {len(after)} gradients preconditioned"


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()


def some_sharded() -> str:
    """The root is not."""
    model, mesh = net(), init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    return _step(model)


def all_sharded() -> str:
    """As in torchtitan."""
    model, mesh = net(), init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    return _step(fully_shard(model, mesh=mesh))


def sharded_and_run() -> str:
    """The root keeps its whole parameters after a forward pass."""
    model = fully_shard(net(), mesh=init_device_mesh("cpu", (2,)))
    model(torch.randn(2, 4))
    return _step(model)


def fsdp1() -> str:
    """With the original parameters shown."""
    return _step(FullyShardedDataParallel(net(), device_id=torch.device("cpu"), use_orig_params=True))


def joined() -> str:
    """Rank 1 has a batch more."""
    model = nn.parallel.DistributedDataParallel(net())
    kfac = KFAC(model, KFACConfig(factor_update_steps=1, inverse_update_steps=1), lr=0.1)
    with model.join():
        for step in range(1 + dist.get_rank()):
            backward(model, step)
            kfac.step()
    return "no error"
