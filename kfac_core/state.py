"""Saving K-FAC and going on elsewhere: the state belongs to layers, not to the ranks that held it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kfac_core.errors import ConfigError
from kfac_core.factors import Key
from kfac_core.placement import FactorJob
from kfac_core.placement.footprint import data_elements, data_layout

if TYPE_CHECKING:
    from kfac_core.preconditioner import KFAC

STATE_VERSION = 2
_READABLE = (1, STATE_VERSION)  # 1 did not say of a gathered state what was solved, or was to be


def gather_state(kfac: KFAC) -> dict[str, Any]:
    """Collect every factor and its second-order data from its owner; a collective call.

    Plain tensors, numbers and strings, so that `torch.load(..., weights_only=True)` reads it back.
    """
    factors: dict[str, Tensor] = {}
    second_order: dict[str, Tensor] = {}
    updates: dict[str, int] = {}
    solved: list[str] = []
    for name, job in _named_jobs(kfac):
        key = job.layer, job.kind
        factors[name] = _fetch(kfac, job, kfac._factors.running.get(key), kfac._factors.empty(job.shape))
        elements = data_elements(kfac.config, job.shape)
        like = kfac._second_order.empty(elements)
        second_order[name] = _fetch(kfac, job, kfac._second_order.data.get(key), like)
        count, room = kfac._factors.updates.get(key), kfac._factors.empty(None)
        updates[name] = int(_fetch(kfac, job, count, room))
        if int(_fetch(kfac, job, room.fill_(key in kfac._second_order.solved), room)):
            solved.append(name)
    return {
        "version": STATE_VERSION,
        "steps": kfac.steps,
        "skipped_steps": kfac.skipped_steps,
        "solver": data_layout(kfac.config),
        "must_solve": kfac._must_solve,
        "factors": factors,
        "second_order": second_order,
        "solved": solved,
        "updates": updates,
    }


def restore_state(kfac: KFAC, state: Mapping[str, Any]) -> None:
    """Hand each rank what its placement asks for.

    Raises:
        ConfigError: another version, other layers or other shapes.
    """
    _check_version(state)
    names = _names(kfac)
    odd = names.keys() ^ state["factors"].keys()
    if odd:
        some = ", ".join(sorted(odd)[:4])
        raise ConfigError(f"the saved K-FAC state is of other layers: {some} do not match")
    _check_shapes(kfac, state["factors"])
    kfac.discard()
    kfac.steps, kfac.skipped_steps = int(state["steps"]), int(state["skipped_steps"])
    factors: dict[Key, Tensor] = {names[name]: value for name, value in state["factors"].items()}
    kfac._factors.restore(factors, {names[name]: count for name, count in state["updates"].items()})
    another = state["solver"] != data_layout(kfac.config)
    kfac._must_solve = (another or bool(state.get("must_solve", False))) and kfac.steps > 0
    if not another:
        data = {names[name]: value for name, value in state["second_order"].items()}
        kfac._second_order.restore(data, {names[name] for name in state.get("solved", names)})


def state_shard(kfac: KFAC) -> dict[str, Any]:
    """What this rank alone has to save: the factors that it keeps and what it made of them; nothing travels.

    The shards of all ranks together are the whole state, see `merge_shards`. Plain tensors, numbers and
    strings on the CPU.
    """
    factors, second_order = kfac._factors, kfac._second_order
    own = {key: name for name, key in _names(kfac).items() if key in factors.running}
    solved = {(job.layer, job.kind) for job in second_order.own}
    return {
        "version": STATE_VERSION,
        "steps": kfac.steps,
        "skipped_steps": kfac.skipped_steps,
        "solver": data_layout(kfac.config),
        "must_solve": kfac._must_solve,
        "factors": {name: _saved(factors.running[key]) for key, name in own.items()},
        "updates": {name: int(factors.updates[key]) for key, name in own.items()},
        "refused": {name: int(factors.refused[key]) for key, name in own.items()},
        "second_order": {name: _saved(second_order.data[key]) for key, name in own.items() if key in solved},
        "solved": sorted(name for key, name in own.items() if key in second_order.solved),
    }


def restore_shard(kfac: KFAC, shard: Mapping[str, Any]) -> None:
    """Go on from this rank's own shard, in the world and with the configuration it was saved under.

    Every rank calls it: second-order data comes back from the rank that solved it, bit for bit.

    Raises:
        ConfigError: another version, or the shard of another rank, placement, model or solver.
    """
    _check_version(shard)
    names = _names(kfac)
    own = {name for name, key in names.items() if key in kfac._factors.running}
    if set(shard["factors"]) != own or shard["solver"] != data_layout(kfac.config):
        raise ConfigError(
            f"this K-FAC shard holds {len(shard['factors'])} factors for solver {shard['solver']}, this rank "
            f"keeps {len(own)} for {data_layout(kfac.config)}, and not the same ones: merge_shards moves it"
        )
    _check_shapes(kfac, shard["factors"])
    kfac.discard()
    kfac.steps, kfac.skipped_steps = int(shard["steps"]), int(shard["skipped_steps"])
    kfac._must_solve = bool(shard["must_solve"])
    factors, second_order = kfac._factors, kfac._second_order
    for name in own:
        key = names[name]
        factors.running[key].copy_(shard["factors"][name])
        factors.updates[key].fill_(shard["updates"][name])
        factors.refused[key].fill_(shard["refused"][name])
    for name, data in shard["second_order"].items():
        second_order.data[names[name]].copy_(data)
    second_order.solved = {names[name] for name in shard["solved"]}
    second_order.exchange()


def merge_shards(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The shards of all ranks as one state for `KFAC.load_state_dict`, in any other world or strategy."""
    whole = {key: shards[0][key] for key in ("version", "steps", "skipped_steps", "solver")}
    for kind in ("factors", "updates", "second_order"):
        merged: dict[str, Any] = {}
        for shard in reversed(shards):  # where several ranks keep a factor, the first one's counts
            merged.update(shard[kind])
        whole[kind] = merged
    whole["must_solve"] = any(shard["must_solve"] for shard in shards)
    whole["solved"] = sorted({name for shard in shards for name in shard["solved"]})
    return whole


def _names(kfac: KFAC) -> dict[str, Key]:
    return {name: (job.layer, job.kind) for name, job in _named_jobs(kfac)}


def _saved(tensor: Tensor) -> Tensor:
    """A copy of its own on the CPU: a view would drag the whole buffer into the file."""
    return tensor.detach().to("cpu", copy=True)


def _check_version(state: Mapping[str, Any]) -> None:
    version = state.get("version")
    if version not in _READABLE:
        raise ConfigError(f"K-FAC state of version {version}; this one reads 1 and {STATE_VERSION}")


def _check_shapes(kfac: KFAC, factors: Mapping[str, Tensor]) -> None:
    for name, job in _named_jobs(kfac):
        if name in factors:
            want = (job.shape.blocks, job.shape.dim, job.shape.dim)
            if (got := tuple(factors[name].shape)) != want:
                raise ConfigError(f"factor {name} is saved as {list(got)}, this model has {list(want)}")


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
