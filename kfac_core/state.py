"""Saving K-FAC and going on elsewhere: the state belongs to layers, not to the ranks that held it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kfac_core.errors import ConfigError
from kfac_core.factors import Key
from kfac_core.footprint import data_elements
from kfac_core.placement import FactorJob

if TYPE_CHECKING:
    from kfac_core.preconditioner import KFAC

STATE_VERSION = 1


def gather_state(kfac: KFAC) -> dict[str, Any]:
    """Collect every factor and its second-order data from its owner; a collective call.

    Plain tensors, numbers and strings, so that `torch.load(..., weights_only=True)` reads it back.
    """
    factors: dict[str, Tensor] = {}
    second_order: dict[str, Tensor] = {}
    updates: dict[str, int] = {}
    for name, job in _named_jobs(kfac):
        key = job.layer, job.kind
        factors[name] = _fetch(kfac, job, kfac._factors.running.get(key), kfac._factors.empty(job.shape))
        elements = data_elements(kfac.config.solver, job.shape)
        like = kfac._second_order.empty(elements)
        second_order[name] = _fetch(kfac, job, kfac._second_order.data.get(key), like)
        count = kfac._factors.updates.get(key)
        updates[name] = int(_fetch(kfac, job, count, kfac._factors.empty(None)))
    return {
        "version": STATE_VERSION,
        "steps": kfac.steps,
        "skipped_steps": kfac.skipped_steps,
        "solver": kfac.config.solver,
        "factors": factors,
        "second_order": second_order,
        "updates": updates,
    }


def restore_state(kfac: KFAC, state: Mapping[str, Any]) -> None:
    """Hand each rank what its placement asks for.

    Raises:
        ConfigError: another version, other layers or other shapes.
    """
    if state.get("version") != STATE_VERSION:
        raise ConfigError(f"K-FAC state of version {state.get('version')}; this one reads {STATE_VERSION}")
    names = {name: (job.layer, job.kind) for name, job in _named_jobs(kfac)}
    odd = names.keys() ^ state["factors"].keys()
    if odd:
        some = ", ".join(sorted(odd)[:4])
        raise ConfigError(f"the saved K-FAC state is of other layers: {some} do not match")
    for name, job in _named_jobs(kfac):
        shape, got = (job.shape.blocks, job.shape.dim, job.shape.dim), tuple(state["factors"][name].shape)
        if got != shape:
            raise ConfigError(f"factor {name} is saved as {list(got)}, this model has {list(shape)}")
    kfac.steps, kfac.skipped_steps = int(state["steps"]), int(state["skipped_steps"])
    factors: dict[Key, Tensor] = {names[name]: value for name, value in state["factors"].items()}
    kfac._factors.restore(factors, {names[name]: count for name, count in state["updates"].items()})
    kfac._must_solve = state["solver"] != kfac.config.solver and kfac.steps > 0
    if state["solver"] == kfac.config.solver:
        kfac._second_order.restore({names[name]: value for name, value in state["second_order"].items()})
    kfac._capture.clear()


def _named_jobs(kfac: KFAC) -> Iterator[tuple[str, FactorJob]]:
    for job in kfac._factors.jobs:
        yield f"{kfac.shapes[job.layer].name}.{job.kind}", job


def _fetch(kfac: KFAC, job: FactorJob, held: Tensor | None, like: Tensor) -> Tensor:
    """The tensor of the job's first inverse worker, on the CPU of every rank."""
    communicator, source = kfac._communicator, job.inverse_workers[0]
    value = held.clone() if held is not None else like
    if len(job.inverse_workers) < communicator.world_size:
        communicator.broadcast(value, source)
    return value.cpu()
