"""Settings that a cell's other settings leave without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from harness.cell import OPTIMIZER_FIELDS, Optimizer, Training, Workload
from harness.workloads import WORKLOADS
from kfac_core.config import KFACConfig

Unread = tuple[str, str]
"""A dotted path and why it is not read: `("optimizer.momentum", "adam takes weight_decay alone")`."""


class Sections(Protocol):
    """The sections of a cell that declare what they read."""

    @property
    def workload(self) -> Workload: ...
    @property
    def training(self) -> Training: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def kfac(self) -> KFACConfig | None: ...


def is_off(value: Any) -> bool:
    """Whether a value only says that something is switched off, which is true of what is not read."""
    return value is None or value is False or value in (0, "", [], ())


def unread(sections: Sections) -> Mapping[str, str]:
    """The fields that no code of such a run reads, by dotted path, each with the reason."""
    found = [*_of_optimizer(sections.optimizer), *_of_workload(sections.workload)]
    if sections.kfac is None:
        found.append(("training.factor_micro_batches", "without a kfac section"))
    elif sections.training.accumulate == 1:
        found.append(("training.factor_micro_batches", "without accumulate > 1"))
    if sections.kfac is not None:
        found += _of_kfac(sections.kfac)
    if sections.training.sync_batch_norm:
        found += _of_batch_norm(sections.workload)
    return dict(found)


def _of_optimizer(optimizer: Optimizer) -> Iterator[Unread]:
    taken = OPTIMIZER_FIELDS[optimizer.name]
    for field in dict.fromkeys(field for fields in OPTIMIZER_FIELDS.values() for field in fields):
        if field not in taken:
            users = ", ".join(name for name, fields in OPTIMIZER_FIELDS.items() if field in fields)
            yield f"optimizer.{field}", f"with {optimizer.name}; it is for {users}"
    if not optimizer.decay_epochs:
        yield "optimizer.decay_factor", "without decay_epochs"
    if optimizer.schedule is not None:
        for field in ("warmup_epochs", "decay_epochs"):
            yield f"optimizer.{field}", "beside optimizer.schedule, which has its own"


def _of_workload(workload: Workload) -> Iterator[Unread]:
    for (given, value), options in WORKLOADS[workload.name].ignored.items():
        if workload.options[given] == value:
            for option in options:
                yield f"workload.options.{option}", f"with {given}={value!r}"


def _of_batch_norm(workload: Workload) -> Iterator[Unread]:
    reason = WORKLOADS[workload.name].no_batch_norm(workload.options)
    if reason:
        yield "training.sync_batch_norm", f"with workload {workload.name}: {reason}"


def _of_kfac(config: KFACConfig) -> Iterator[Unread]:
    if config.strategy in ("d_kfac", "spd_kfac"):
        how = "all ranks do all work" if config.strategy == "d_kfac" else "it has the paper's own rule"
        for field in ("assignment", "costs"):
            yield f"kfac.{field}", f"with strategy={config.strategy}: {how}"
    elif config.placed_by == "round_robin":
        yield "kfac.costs", f"with strategy={config.strategy}, which assigns layers by round robin here"
