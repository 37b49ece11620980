"""Saving and restoring K-FAC.

Saved state is keyed by layer, not by rank, so that it can be restored on another world size, strategy or
solver. The functions work on a `Snapshot` that `KFAC` hands over.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from kfac_core.collectives import Communicator
from kfac_core.config import KFACConfig
from kfac_core.errors import ConfigError
from kfac_core.factors import Factors, Key
from kfac_core.layers.layer import unwrapped_name
from kfac_core.placement import FactorJob, LayerShape
from kfac_core.placement.placement import data_elements, data_layout
from kfac_core.second_order import SecondOrder

STATE_VERSION = 2
_READABLE = (1, STATE_VERSION)  # 1 did not say of a gathered state what was solved, or was to be


@dataclass(frozen=True)
class Counters:
    """The scalar part of K-FAC's state.

    Attributes:
        must_solve: second-order data has to be solved at the next step, due or not.
        owes_factors: factors have to be updated at the next step, due or not.
        solved_at: the step and the damping of the last second-order update; None before the first, and where
            an older state does not say.
    """

    steps: int
    skipped_steps: int
    must_solve: bool
    owes_factors: bool
    solved_at: tuple[int, float] | None


@dataclass(frozen=True)
class Snapshot:
    """What K-FAC's state is made of on this rank: references, not copies.

    Attributes:
        damping_at: the damping of this configuration at any step.
    """

    config: KFACConfig
    shapes: Sequence[LayerShape]
    communicator: Communicator
    factors: Factors
    second_order: SecondOrder
    progress: Counters
    damping_at: Callable[[int], float]

    def named_jobs(self) -> Iterator[tuple[str, FactorJob]]:
        """Every factor with its name, `<layer>.a` or `<layer>.g`."""
        for job in self.factors.jobs:
            yield f"{self.shapes[job.layer].name}.{job.kind}", job

    def keys(self) -> dict[str, Key]:
        """Key of every factor by name."""
        return {name: (job.layer, job.kind) for name, job in self.named_jobs()}


def gather_state(kfac: Snapshot) -> dict[str, Any]:
    """Collect every factor and its second-order data from its owner; a collective call.

    Plain tensors, numbers and strings, so that `torch.load(..., weights_only=True)` reads it back.
    """
    factors: dict[str, Tensor] = {}
    second_order: dict[str, Tensor] = {}
    updates: dict[str, int] = {}
    solved: list[str] = []
    for name, job in kfac.named_jobs():
        key = job.layer, job.kind
        factors[name] = _fetch(kfac, job, kfac.factors.running.get(key), kfac.factors.empty(job.shape))
        elements = data_elements(kfac.config, job.shape)
        like = kfac.second_order.empty(elements)
        second_order[name] = _fetch(kfac, job, kfac.second_order.data.get(key), like)
        count, buffer = kfac.factors.updates.get(key), kfac.factors.empty(None)
        updates[name] = int(_fetch(kfac, job, count, buffer))
        if int(_fetch(kfac, job, buffer.fill_(key in kfac.second_order.solved), buffer)):
            solved.append(name)
    return {
        "version": STATE_VERSION,
        "steps": kfac.progress.steps,
        "skipped_steps": kfac.progress.skipped_steps,
        "solver": data_layout(kfac.config),
        "must_solve": kfac.progress.must_solve,
        "owes_factors": kfac.progress.owes_factors,
        "solved_at": kfac.progress.solved_at,
        "factors": factors,
        "second_order": second_order,
        "solved": solved,
        "updates": updates,
    }


class IncompatibleKeys(NamedTuple):
    """Factors that a state and this model do not share, by name, `<layer>.a` or `<layer>.g`.

    Attributes:
        missing_keys: of the model, not in the state.
        unexpected_keys: in the state, not of the model.
        mismatched_keys: in both, with another shape.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    mismatched_keys: list[str]


def check_state(kfac: Snapshot, state: Mapping[str, Any], *, strict: bool = True) -> IncompatibleKeys:
    """Check that a gathered state fits, before anything is changed.

    Returns:
        What does not fit, all empty if `strict`.

    Raises:
        ConfigError: another version; if `strict`, other layers or other shapes, naming all of them.
    """
    if not isinstance(state, Mapping):
        raise ConfigError(f"a K-FAC state must be a mapping, got a {type(state).__name__}")
    _check_version(state)
    wanted, saved = kfac.keys().keys(), state["factors"].keys()
    shapes = _other_shapes(kfac, state["factors"])
    found = IncompatibleKeys(sorted(wanted - saved), sorted(saved - wanted), sorted(shapes))
    if strict and any(found):
        lists = (("missing", found.missing_keys), ("unexpected", found.unexpected_keys))
        differences = [f"{kind} {', '.join(names)}" for kind, names in lists if names]
        differences += [
            f"factor {name} is saved as {got}, this model has {want}" for name, (got, want) in shapes.items()
        ]
        raise ConfigError(
            f"the saved K-FAC state is of other layers: {'; '.join(differences)}; strict=False loads what "
            "matches"
        )
    return found


def restore_state(kfac: Snapshot, state: Mapping[str, Any]) -> Counters:
    """Give each rank the factors and second-order data that its placement asks for.

    Args:
        kfac: where to write.
        state: of `gather_state` or `merge_shards`, checked by `check_state`.
    """
    names = kfac.keys()
    factors: dict[Key, Tensor] = {names[name]: value for name, value in state["factors"].items()}
    kfac.factors.restore(factors, {names[name]: count for name, count in state["updates"].items()})
    steps, other_solver = int(state["steps"]), state["solver"] != data_layout(kfac.config)
    if not other_solver:
        data = {names[name]: value for name, value in state["second_order"].items()}
        kfac.second_order.restore(data, {names[name] for name in state.get("solved", names)})
    return _counters(kfac, state, must_solve=other_solver and steps > 0)


def restore_known(kfac: Snapshot, state: Mapping[str, Any]) -> Counters:
    """Load the running means of the factors that a gathered state has in the same shape; others stay.

    Second-order data are to be solved from them.
    """
    for name, job in kfac.named_jobs():
        key, saved = (job.layer, job.kind), state["factors"].get(name)
        running = kfac.factors.running.get(key)
        if saved is not None and running is not None and saved.shape == running.shape:
            running.copy_(saved)
            kfac.factors.updates[key].fill_(state["updates"][name])
    return _counters(kfac, state, must_solve=int(state["steps"]) > 0)


def state_shard(kfac: Snapshot) -> dict[str, Any]:
    """This rank's part of the state: the factors it keeps and their second-order data; no communication.

    The shards of all ranks together are the whole state (`merge_shards`). Plain tensors, numbers and strings
    on the CPU.
    """
    factors, second_order = kfac.factors, kfac.second_order
    own = {key: name for name, key in kfac.keys().items() if key in factors.running}
    solved = {(job.layer, job.kind) for job in second_order.own}
    return {
        "version": STATE_VERSION,
        "steps": kfac.progress.steps,
        "skipped_steps": kfac.progress.skipped_steps,
        "solver": data_layout(kfac.config),
        "must_solve": kfac.progress.must_solve,
        "owes_factors": kfac.progress.owes_factors,
        "solved_at": kfac.progress.solved_at,
        "factors": {name: _saved(factors.running[key]) for key, name in own.items()},
        "updates": {name: int(factors.updates[key]) for key, name in own.items()},
        "refused": {name: int(factors.refused[key]) for key, name in own.items()},
        "second_order": {name: _saved(second_order.data[key]) for key, name in own.items() if key in solved},
        "solved": sorted(name for key, name in own.items() if key in second_order.solved),
    }


def check_shard(kfac: Snapshot, shard: Mapping[str, Any]) -> None:
    """Check that a shard is this rank's, before anything is changed.

    Raises:
        ConfigError: another version, or the shard of another rank, placement, model or solver.
    """
    _check_version(shard)
    own = {name for name, key in kfac.keys().items() if key in kfac.factors.running}
    if set(shard["factors"]) != own or shard["solver"] != data_layout(kfac.config):
        raise ConfigError(
            f"this K-FAC shard holds {len(shard['factors'])} factors for solver {shard['solver']}, this rank "
            f"keeps {len(own)} for {data_layout(kfac.config)}, and not the same ones: merge_shards moves it"
        )
    _check_shapes(kfac, shard["factors"])


def restore_shard(kfac: Snapshot, shard: Mapping[str, Any]) -> Counters:
    """Restore this rank's own shard in the world and configuration that it was saved under.

    Every rank calls it: second-order data comes back from the rank that solved it, bit for bit.

    Args:
        kfac: where to write.
        shard: of `state_shard` on this rank, checked by `check_shard`.
    """
    names, factors, second_order = kfac.keys(), kfac.factors, kfac.second_order
    for name, factor in shard["factors"].items():
        key = names[name]
        factors.running[key].copy_(factor)
        factors.updates[key].fill_(shard["updates"][name])
        factors.refused[key].fill_(shard["refused"][name])
    for name, data in shard["second_order"].items():
        second_order.data[names[name]].copy_(data)
    second_order.solved = {names[name] for name in shard["solved"]}
    second_order.exchange()
    second_order.settle()
    return _counters(kfac, shard)


def merge_shards(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The shards of all ranks as one state for `KFAC.load_state_dict`, in any other world or strategy."""
    whole = {key: shards[0][key] for key in ("version", "steps", "skipped_steps", "solver")}
    for kind in ("factors", "updates", "second_order"):
        merged: dict[str, Any] = {}
        for shard in reversed(shards):  # where several ranks keep a factor, the first one's counts
            merged.update(shard[kind])
        whole[kind] = merged
    whole["must_solve"] = any(shard["must_solve"] for shard in shards)
    whole["owes_factors"] = any(map(_owes_factors, shards))
    whole["solved_at"] = shards[0].get("solved_at")
    whole["solved"] = sorted({name for shard in shards for name in shard["solved"]})
    return whole


def _unwrapped(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state that was saved with the names of wrappers in those of the layers, without them."""
    if not isinstance(state, Mapping):
        return state  # `check_state` says so
    plain = dict(state)
    for kind in ("factors", "updates", "refused", "second_order"):
        if kind in plain:
            plain[kind] = {unwrapped_name(name): value for name, value in plain[kind].items()}
    if "solved" in plain:
        plain["solved"] = [unwrapped_name(name) for name in plain["solved"]]
    return plain


def _counters(kfac: Snapshot, state: Mapping[str, Any], *, must_solve: bool = False) -> Counters:
    """The scalar part of a state or shard, of which older ones have less.

    Saved inverses are of the damping that they were solved with. They are solved again if this configuration
    has another one for that step; the same schedule goes on bitwise.
    """
    steps, solved_at = int(state["steps"]), state.get("solved_at")
    at = (int(solved_at[0]), float(solved_at[1])) if solved_at is not None else None
    must_solve |= bool(state.get("must_solve", False)) and steps > 0
    must_solve |= at is not None and kfac.second_order.holds_damping and kfac.damping_at(at[0]) != at[1]
    return Counters(steps, int(state["skipped_steps"]), must_solve, _owes_factors(state), at)


def _owes_factors(state: Mapping[str, Any]) -> bool:
    """Whether a factor update is to be made up for; older states do not say."""
    return bool(state.get("owes_factors", False))


def _saved(tensor: Tensor) -> Tensor:
    """A separate copy on the CPU: saving a view would save the whole buffer."""
    return tensor.detach().to("cpu", copy=True)


def _check_version(state: Mapping[str, Any]) -> None:
    version = state.get("version")
    if version not in _READABLE:
        raise ConfigError(f"K-FAC state of version {version}; this one reads 1 and {STATE_VERSION}")


def _check_shapes(kfac: Snapshot, factors: Mapping[str, Tensor]) -> None:
    for name, (got, want) in _other_shapes(kfac, factors).items():
        raise ConfigError(f"factor {name} is saved as {got}, this model has {want}")


def _other_shapes(kfac: Snapshot, factors: Mapping[str, Tensor]) -> dict[str, tuple[list[int], list[int]]]:
    """Of factors that are saved in another shape: that, and the model's."""
    wanted = {name: [job.shape.blocks, job.shape.dim, job.shape.dim] for name, job in kfac.named_jobs()}
    got = {name: list(factors[name].shape) for name in wanted if name in factors}
    return {name: (shape, wanted[name]) for name, shape in got.items() if shape != wanted[name]}


def _fetch(kfac: Snapshot, job: FactorJob, held: Tensor | None, like: Tensor) -> Tensor:
    """The tensor of the job's first inverse worker, on the CPU of every rank."""
    communicator, source = kfac.communicator, job.inverse_workers[0]
    value = held.clone() if held is not None else like
    if len(job.inverse_workers) < communicator.world_size:
        communicator.broadcast(value, source)
    return value.cpu()


class Resumable(ABC):
    """A preconditioner whose state can be saved, and resumed in another world."""

    steps: int
    skipped_steps: int
    _must_solve: bool
    _owes_factors: bool
    _solved_at: tuple[int, float] | None

    @abstractmethod
    def discard(self) -> None:
        """Discard the statistics of the last backward pass."""

    @abstractmethod
    def _snapshot(self) -> Snapshot:
        """What there is to save, with all steps decided."""

    def state_dict(self) -> dict[str, Any]:
        """The whole state on the CPU, the same on all ranks, to resume bitwise; every rank must call it."""
        return gather_state(self._snapshot())

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> IncompatibleKeys:
        """Resume from a saved state, also on another world size, strategy or solver.

        Factors move to their new owners. With another solver, or inverses of another damping, the next step
        solves the second-order data again. With
        `overlap_factors` every rank must call this, as it receives what is in flight (`discard`).

        Args:
            state: of `state_dict` or `merge_shards`.
            strict: whether all layers have to be the same. False loads the factors of the same name and
                shape; others stay as they are, and the next step solves all second-order data again.

        Returns:
            What did not match; nothing if `strict`.

        Raises:
            ConfigError: the state is of other layers, and `strict`; or of another version.
        """
        state = _unwrapped(state)
        found = check_state(self._snapshot(), state, strict=strict)
        self._restore(partial(restore_known if any(found) else restore_state, state=state))
        return found

    def state_shard(self) -> dict[str, Any]:
        """This rank's part of the state, on the CPU; no communication.

        A factor is in one rank's part, unless several ranks keep it (d_kfac, small ones of spd_kfac).
        """
        return state_shard(self._snapshot())

    def load_state_shard(self, shard: Mapping[str, Any]) -> None:
        """Resume bitwise in the world, strategy and solver of `shard`; every rank must call it.

        With others: `load_state_dict(kfac_core.state.merge_shards(shards))`.

        Raises:
            ConfigError: the shard is not this rank's.
        """
        shard = _unwrapped(shard)
        check_shard(self._snapshot(), shard)
        self._restore(partial(restore_shard, shard=shard))

    def _restore(self, restored: Callable[[Snapshot], Counters]) -> None:
        self.discard()
        progress = restored(self._snapshot())
        self.steps, self.skipped_steps = progress.steps, progress.skipped_steps
        self._must_solve, self._owes_factors = progress.must_solve, progress.owes_factors
        self._solved_at = progress.solved_at
