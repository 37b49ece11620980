"""Steps of two public K-FAC packages, from plain checkouts, with the settings of the papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, but hidden from checkers

from harness.bench.peer_imports import imports_from

Peer = tuple[Callable[[int], None], Callable[[], None]]
"""Sets the step's number, before its forward pass; and preconditions, after its backward pass."""

_DAMPING, _DECAY, _KL_CLIP, _LR = 0.003, 0.95, 0.001, 0.1


def gpauloski(
    checkout: str, solver: str, model: nn.Module, skip: Sequence[str], intervals: tuple[int, int]
) -> Peer:
    """github.com/gpauloski/kfac-pytorch; `intervals` are factor and inverse steps."""
    with imports_from(checkout):
        enums, preconditioner = import_module("kfac.enums"), import_module("kfac.preconditioner")
    theirs: Any = preconditioner.KFACPreconditioner(
        model, factor_update_steps=intervals[0], inv_update_steps=intervals[1], damping=_DAMPING,
        factor_decay=_DECAY, kl_clip=_KL_CLIP, lr=_LR,
        compute_method={"eigen": enums.ComputeMethod.EIGEN, "inverse": enums.ComputeMethod.INVERSE}[solver],
        skip_layers=[f"^{each}" for each in skip],
    )  # fmt: skip

    def prepare(step: int) -> None:
        theirs._steps = step

    return prepare, theirs.step


def lzhangbv(
    checkout: str, solver: str, model: nn.Module, skip: Sequence[str], intervals: tuple[int, int]
) -> Peer:
    """github.com/lzhangbv/kfac_pytorch, which takes no list of layers to skip."""
    if skip:
        raise ValueError("it takes no list of layers to skip")
    if not dist.is_initialized():  # it cannot do without
        on_gpu = next(model.parameters()).is_cuda
        dist.init_process_group("nccl" if on_gpu else "gloo", store=HashStore(), rank=0, world_size=1)
    with imports_from(checkout):
        package = import_module("kfac")
        import_module("kfac.backend").init("Torch")
    theirs: Any = package.get_kfac_module(solver)(
        model, lr=_LR, damping=_DAMPING, fac_update_freq=intervals[0], kfac_update_freq=intervals[1],
        kl_clip=_KL_CLIP, factor_decay=1 - _DECAY,
    )  # fmt: skip
    begun = False

    def prepare(step: int) -> None:
        nonlocal begun
        theirs.steps = step if begun and step else intervals[1] * begun  # step 0 makes their buffers
        begun = True

    return prepare, theirs.step


PEERS: Mapping[str, Callable[..., Peer]] = {"gpauloski": gpauloski, "lzhangbv": lzhangbv}
