"""A site: where ranks run. Facts about a cluster are in its site profile, never in a sweep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from harness.cell import Spec
from harness.errors import NoSiteError, SiteError
from harness.launchers.slurm_profile import START_MINUTES, SlurmProfile
from harness.shipped import find, find_all
from harness.yaml_files.document import Place, read_document, value_at
from harness.yaml_files.validation_messages import did_you_mean, explain, not_allowed

DEFAULT_FOLDER = Path("jobs/sites")


class Site(Spec):
    """A site profile, `jobs/sites/<name>.yaml`."""

    # Launches of earlier versions have fields that are gone. `read_site` refuses unknown keys of a profile.
    model_config = ConfigDict(extra="ignore")

    name: str
    """Name of the profile: that of its file, so it can be left out. Example: `my-cluster`."""

    launcher: Literal["local", "slurm"] = "local"
    """`local` starts ranks on this host, `slurm` submits jobs. Example: `slurm`."""

    cpus: int | None = Field(default=None, ge=1)
    """CPUs on this host, for launcher `local`; null takes every CPU that this process may use.
    Example: `8`."""

    gpus: int | None = Field(default=None, ge=0)
    """GPUs on this host, for launcher `local`; null takes what the driver shows. Example: `4`."""

    cpus_per_rank: int = Field(default=1, ge=1)
    """CPUs locked or requested, pinned, and given as threads to each rank. Example: `8`."""

    gpus_per_rank: Literal[0, 1] = 0
    """GPUs of each rank. With 1 a rank that sees too few refuses to train; with 0 ranks compute on CPUs even
    where they see a GPU. Example: `1`."""

    oversubscribe: bool = False
    """Whether a cell that needs more CPUs than the site has may run with all of them, alone and marked as
    oversubscribed; otherwise it is refused. Example: `true`."""

    oversubscribe_limit: float = Field(default=4.0, ge=1)
    """With `oversubscribe`, how many times the site's CPUs a cell may need; a wider one is refused, because
    it is meant for a cluster. Example: `8`."""

    one_at_a_time: bool = False
    """Whether cells run one after another, block after block, for timing: on this host a cell holds all CPUs
    and GPUs of the site, and uses those of its ranks; on Slurm one job of an array runs at a time.
    Example: `true`."""

    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    """Communication backend; `auto` is nccl for ranks with a GPU and gloo for others. With `mpi` the local
    launcher starts the ranks under `mpiexec`, of MPICH or a relative. Example: `mpi`."""

    python: str | None = None
    """Python of the ranks, and without `launch_prefix` of the jobs that start them: a path, or a name that is
    looked up on PATH after `slurm.setup`. Null takes the one that submits. Kronscale must be importable in
    it. Example: `python3`."""

    launch_prefix: tuple[str, ...] = ()
    """Words in front of the command of every rank, such as those that start a container; no shell reads them.
    The run folder, the data and `python` must be visible behind them.
    Example: `[apptainer, exec, --nv, /project/kronscale.sif]`."""

    rendezvous_minutes: float = Field(default=15.0, gt=0)
    """How long ranks wait for rank 0 to start; a thousand of them can take minutes to import torch from a
    shared file system. Example: `30`."""

    peer_minutes: float = Field(default=10.0, gt=0)
    """A collective that takes longer has lost a peer, and the run fails. A rank that dies is noticed at once
    by its launcher. Example: `20`."""

    staging_minutes: float = Field(default=60.0, gt=0)
    """How long ranks wait for others that still load or copy their data before the first step.
    Example: `120`."""

    timeout_minutes: TimeLimits = 60.0
    """An attempt that runs longer is ended with TIMEOUT. Limits by world size hold from each size up to the
    next; what is smaller than all of them is refused. Example: `{16: 1200, 256: 120}`."""

    max_continuations: int = Field(default=0, ge=0)
    """How many times a run that meets its time limit is continued by itself from its checkpoint, each time
    with the whole limit; not after two attempts in a row without progress, nor once the submission has used
    up its `--budget`. Example: `5`."""

    grace_seconds: float = Field(default=60.0, gt=0)
    """Time that ranks get to save a checkpoint when they have to stop. They are asked to so long before the
    time limit, but not before half of it. Example: `120`."""

    checkpoint_every_epochs: int | None = Field(default=None, ge=1)
    """Interval of checkpoints in epochs; null for none. Example: `5`."""

    checkpoint_every_minutes: float | None = Field(default=None, gt=0)
    """Interval of checkpoints in minutes; null for none. Example: `15`."""

    traced_steps: tuple[int, int] | None = None
    """`[first, end]`: steps whose phases are recorded one by one with their start, for
    `kronscale export trace`; an inverse period contains every kind of phase. Example: `[100, 200]`."""

    profiler_ranges: bool = False
    """Whether phases are shown to profilers as `kronscale.<phase>`: torch's, and on a GPU NVTX's for Nsight
    Systems, which `setup` and `srun` can put in front of the ranks. Example: `true`."""

    split_wait: bool = False
    """Whether ranks meet before every collective, so that waiting for late ranks is measured apart from
    moving bytes; a barrier more for each, so steps are slower. Example: `true`."""

    group_readable: bool = False
    """Whether the folder's group may read new sweeps' runs, as far as your umask lets it (027 does);
    otherwise only you can. Example: `true`."""

    shared_runs: bool = False
    """Whether attempts are started too where other users own or may write the run folder; each of them can
    then run commands as you. Otherwise such attempts are shown and left alone. Example: `true`."""

    environment: dict[str, str] = {}
    """Extra variables for the ranks; written into the run folder, so never put secrets here.
    Example: `{NCCL_SOCKET_IFNAME: ib0}`."""

    slurm: SlurmProfile | None = None
    """For launcher `slurm`, facts of the cluster. Example: `{ranks_per_node: 4, partition: gpu}`."""

    @property
    def limits_minutes(self) -> tuple[float, ...]:
        """The time limits of all world sizes, at least one."""
        limits = self.timeout_minutes
        return tuple(limits.values()) if isinstance(limits, dict) else (limits,)

    def limit_minutes(self, world_size: int) -> float:
        """Time limit of an attempt on so many ranks.

        Raises:
            SiteError: the profile has limits for larger worlds only.
        """
        limits = self.timeout_minutes
        if not isinstance(limits, dict):
            return limits
        size = max((size for size in limits if size <= world_size), default=None)
        if size is None:
            listed = ", ".join(map(str, sorted(limits)))
            raise SiteError(
                f"site {self.name} has no timeout_minutes for a world size of {world_size}, only from "
                f"{min(limits)} up ({listed}): add one of at most {world_size}"
            )
        return limits[size]

    def save_seconds(self, world_size: int) -> float:
        """How long before its time limit an attempt is asked to save a checkpoint and to end."""
        return min(self.grace_seconds, self.limit_minutes(world_size) * 30)

    @model_validator(mode="after")
    def _backend_reaches_the_device(self) -> Self:
        if self.backend == "nccl" and not self.gpus_per_rank:
            raise ValueError("backend=nccl moves GPU memory; set gpus_per_rank: 1, or use gloo or mpi")
        if self.backend == "gloo" and self.gpus_per_rank:
            raise ValueError("backend=gloo moves CPU memory; set gpus_per_rank: 0, or use nccl")
        return self

    @model_validator(mode="after")
    def _prefix_is_words(self) -> Self:
        named = [("launch_prefix", word) for word in self.launch_prefix]
        for name, word in [*named, ("python", "python" if self.python is None else self.python)]:
            if not word or "\0" in word or "\n" in word:
                raise ValueError(f"{name}={word!r} is a word that is empty or has a line break or NUL")
        return self

    @model_validator(mode="after")
    def _one_at_a_time_is_one(self) -> Self:
        if self.one_at_a_time and self.slurm is not None and self.slurm.cells_per_job > 1:
            raise ValueError(
                f"one_at_a_time=true contradicts slurm.cells_per_job={self.slurm.cells_per_job}, cells side "
                "by side; use pair_arms: true to run the cells of a block in one job, one after another"
            )
        return self

    @model_validator(mode="after")
    def _traced_steps_are_a_range(self) -> Self:
        if self.traced_steps is not None and not 0 <= self.traced_steps[0] < self.traced_steps[1]:
            raise ValueError(
                f"traced_steps={list(self.traced_steps)} must be [first, end] with 0 <= first < end"
            )
        return self

    @model_validator(mode="after")
    def _environment_can_be_set(self) -> Self:
        for name, value in self.environment.items():
            if not name or "=" in name or "\0" in name:
                raise ValueError(f"environment={name!r} is no name of a variable: empty, or with '=' or NUL")
            if "\0" in value:
                raise ValueError(f"environment.{name}={value!r} contains NUL, which no variable can hold")
        return self


def read_site(name: str, folder: Path = DEFAULT_FOLDER) -> Site:
    """Read a profile by name, or by path where `name` ends in `.yaml`.

    Raises:
        SiteError: there is no such profile, or it has a mistake; names the first one with its line.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else find(folder / f"{name}.yaml")
    if not path.exists():
        known = sorted(found.stem for found in find_all(folder, "*.yaml"))
        there = f"{folder} has {', '.join(known)}" if known else f"{folder} has no profile"
        raise NoSiteError(f"{path}: no such site profile; {there}{did_you_mean(path.stem, known)}")
    document = read_document(path, SiteError)
    for key in document.content:
        if key not in Site.model_fields:
            raise document.error((key,), f" is not a key of a site{not_allowed(key, Site.model_fields)}")
    section = document.content.get("slurm")
    for key in section if isinstance(section, dict) else ():
        if key not in SlurmProfile.model_fields:
            allowed = not_allowed(key, SlurmProfile.model_fields)
            raise document.error(("slurm", key), f" is not a key of a site's slurm section{allowed}")
    if document.content.get("name", path.stem) != path.stem:
        raise document.error(("name",), f"={document.content['name']!r} is not the file's name, {path.stem}")
    try:
        site: Site = TypeAdapter(Site).validate_json(
            json.dumps({"name": path.stem, **document.content}), strict=True
        )
    except ValidationError as error:
        place, sentence = explain(error)
        raise document.error(place, sentence) from None
    for place, reason in _unread(site):
        if place in document.lines and value_at(document.content, place):  # false, null or nothing is true
            raise document.error(place, f" has no effect {reason}; remove it")
    for place, sentence in _cannot_act(site):
        if place in document.lines:
            raise document.error(place, sentence)
    for place, sentence in site.slurm.refused() if site.slurm is not None else ():
        raise document.error(place, sentence)
    return site


def _unread(site: Site) -> Iterator[tuple[Place, str]]:
    """What such a site does not read, each with the reason."""
    if site.launcher == "local":
        yield ("slurm",), "with launcher=local"
    else:
        for field in ("cpus", "gpus", "oversubscribe", "oversubscribe_limit"):
            yield (field,), "with launcher=slurm, which requests what each cell needs"
    if not site.oversubscribe:
        yield ("oversubscribe_limit",), "without oversubscribe: true"
    if site.slurm is not None and not site.slurm.exclusive:
        for field in ("cpus_per_node", "gpus_per_node"):
            yield ("slurm", field), "without exclusive: true: the cost of a job is what it requests"
    if not site.gpus_per_rank:
        for place in (("gpus",), ("slurm", "gpus_by"), ("slurm", "gpu_type")):
            yield place, "with gpus_per_rank=0"


def _cannot_act(site: Site) -> Iterator[tuple[Place, str]]:
    """Settings that can never act, or whose cost could not be counted, each with the rest of a sentence."""
    limits = site.limits_minutes
    shortest, longest = min(limits), max(limits)
    if site.grace_seconds > shortest * 30:
        yield (
            ("grace_seconds",),
            f"={site.grace_seconds:g} is more than half of timeout_minutes={shortest:g}, and ranks are "
            f"asked to save in the second half only; use at most {shortest * 30:g}",
        )
    for name in ("checkpoint_every_minutes", "rendezvous_minutes", "peer_minutes", "staging_minutes"):
        minutes = getattr(site, name)
        if minutes is not None and minutes >= longest:
            yield (
                (name,),
                f"={minutes:g} cannot act: an attempt ends after timeout_minutes={longest:g}; use less, or "
                "leave it out",
            )
    if site.slurm is not None and site.slurm.exclusive:
        missing = [
            field
            for field, needed in (("cpus_per_node", True), ("gpus_per_node", site.gpus_per_rank > 0))
            if needed and getattr(site.slurm, field) is None
        ]
        if missing:
            yield ("slurm", "exclusive"), f"=true needs {' and '.join(missing)}, to count what a job holds"
    if site.slurm is not None and site.max_continuations and not site.slurm.requeue:
        yield (
            ("max_continuations",),
            f"={site.max_continuations} cannot act with slurm.requeue=false: a run continues in its own job, "
            "which Slurm starts again",
        )
    if site.slurm is not None and site.slurm.signal_seconds is not None:
        yield from _useless_signal(site, site.slurm.signal_seconds)


def _useless_signal(site: Site, seconds: int) -> Iterator[tuple[Place, str]]:
    """A signal of Slurm that comes after the launcher's own, or as soon as the job starts."""
    asked = START_MINUTES * 60 + min(min(site.grace_seconds, limit * 30) for limit in site.limits_minutes)
    most = min(site.limits_minutes) * 60
    if seconds <= asked:
        yield (
            ("slurm", "signal_seconds"),
            f"={seconds} cannot act: ranks are asked to save {asked:g} s before the end of their job, "
            f"which is grace_seconds before timeout_minutes, and Slurm's limit is {START_MINUTES} minutes "
            "later; use more, or leave it out",
        )
    elif seconds >= most:
        yield (
            ("slurm", "signal_seconds"),
            f"={seconds} would end a job as soon as it starts: timeout_minutes is {most:g} s; use less",
        )


def _checked(value: object) -> object:
    """One limit, or limits by world size with numbers as keys, which JSON has as text."""
    if not isinstance(value, dict):
        return _minutes(value, "")
    if not value:
        raise ValueError("must have a limit for at least one world size")
    return {
        _world_size(size): _minutes(minutes, f" for world size {size}") for size, minutes in value.items()
    }


def _minutes(value: object, of: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf:
        allowed = "must be a number > 0" if of else "must be a number > 0, or such numbers by world size"
        raise ValueError(f"{allowed}, got {value!r}{of}")
    return float(value)


def _world_size(value: object) -> int:
    if not str(value).isdecimal() or int(str(value)) < 1:
        raise ValueError(f"must have world sizes as keys, whole numbers >= 1, got {value!r}")
    return int(str(value))


TimeLimits = Annotated[float | dict[int, float], BeforeValidator(_checked)]
"""Minutes, for every world size or by world size."""
