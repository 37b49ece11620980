"""A site: where ranks run. Facts about a cluster are in its site profile, never in a sweep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from harness.cell import Spec
from harness.errors import SiteError
from harness.launchers.slurm_profile import SlurmProfile
from harness.yaml_files.document import read_document
from harness.yaml_files.validation_messages import did_you_mean, explain, not_allowed

DEFAULT_FOLDER = Path("jobs/sites")


class Site(Spec):
    """A site profile, `jobs/sites/<name>.yaml`.

    Attributes:
        launcher: key of `harness.launchers.LAUNCHERS`.
        cpus: CPU leases on this host; None takes every CPU that this process may use.
        gpus: GPU leases on this host; None takes what the driver shows.
        cpus_per_rank: CPUs leased, pinned and given as threads to each rank.
        gpus_per_rank: GPUs leased to each rank; with 1 a rank that sees too few refuses to train, with 0
            ranks compute on CPUs even where they see a GPU.
        oversubscribe: whether a cell that needs more CPUs than the site has may run with all of them,
            alone and marked as oversubscribed; otherwise it is refused.
        backend: communication backend; auto is nccl for ranks with a GPU and gloo for others. With mpi the
            local launcher starts the ranks under `mpiexec`, of MPICH or a relative.
        timeout_minutes: an attempt that runs longer is ended with TIMEOUT.
        grace_seconds: time that ranks get to save a checkpoint when they have to stop. They are asked to so
            long before the time limit, but not before half of it.
        checkpoint_every_epochs: interval of checkpoints in epochs; None for none.
        checkpoint_every_minutes: interval of checkpoints in minutes; None for none.
        traced_steps: `[first, end]`: steps whose phases are recorded one by one with their start, for
            `kronscale trace`; an inverse period contains every kind of phase.
        profiler_ranges: whether phases are shown to profilers as `kronscale.<phase>`: torch's, and on a GPU
            NVTX's for Nsight Systems, which `setup` and `srun` can put in front of the ranks.
        split_wait: whether ranks meet before every collective, so that waiting for late ranks is measured
            apart from moving bytes; a barrier more for each, so steps are slower.
        single_copy: whether CPU ranks of one host that communicate over Gloo read each other's memory instead
            of sending it; Gloo carries what the kernel refuses.
        ptrace_any: where Yama lets only parents read a process (`kernel.yama.ptrace_scope` is 1), whether
            ranks allow all processes of their user to read them, which `single_copy` needs there.
        group_readable: whether the folder's group may read new sweeps' runs, as far as your umask lets it
            (027 does); otherwise only you can.
        environment: extra variables for the ranks; written into the run folder, so never put secrets here.
        slurm: for launcher slurm, facts of the cluster.
    """

    name: str
    launcher: Literal["local", "slurm"] = "local"
    cpus: int | None = Field(default=None, ge=1)
    gpus: int | None = Field(default=None, ge=0)
    cpus_per_rank: int = Field(default=1, ge=1)
    gpus_per_rank: Literal[0, 1] = 0
    oversubscribe: bool = False
    backend: Literal["auto", "nccl", "gloo", "mpi"] = "auto"
    timeout_minutes: float = Field(default=60.0, gt=0)
    grace_seconds: float = Field(default=60.0, gt=0)
    checkpoint_every_epochs: int | None = Field(default=None, ge=1)
    checkpoint_every_minutes: float | None = Field(default=None, gt=0)
    traced_steps: tuple[int, int] | None = None
    profiler_ranges: bool = False
    split_wait: bool = False
    single_copy: bool = True
    ptrace_any: bool = False
    group_readable: bool = False
    environment: dict[str, str] = {}
    slurm: SlurmProfile | None = None

    @model_validator(mode="after")
    def _backend_reaches_the_device(self) -> Self:
        if self.backend == "nccl" and not self.gpus_per_rank:
            raise ValueError("backend=nccl moves GPU memory; set gpus_per_rank: 1, or use gloo or mpi")
        if self.backend == "gloo" and self.gpus_per_rank:
            raise ValueError("backend=gloo moves CPU memory; set gpus_per_rank: 0, or use nccl")
        return self


def read_site(name: str, folder: Path = DEFAULT_FOLDER) -> Site:
    """Read a profile by name, or by path where `name` ends in `.yaml`.

    Raises:
        SiteError: there is no such profile, or it has a mistake; names the first one with its line.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.exists():
        known = sorted(found.stem for found in folder.glob("*.yaml"))
        there = f"{folder} has {', '.join(known)}" if known else f"{folder} has no profile"
        raise SiteError(f"{path}: no such site profile; {there}{did_you_mean(path.stem, known)}")
    document = read_document(path, SiteError)
    for key in document.content:
        if key not in Site.model_fields:
            raise document.error((key,), f" is not a key of a site{not_allowed(key, Site.model_fields)}")
    if document.content.get("name", path.stem) != path.stem:
        raise document.error(("name",), f"={document.content['name']!r} is not the file's name, {path.stem}")
    try:
        return TypeAdapter(Site).validate_json(
            json.dumps({"name": path.stem, **document.content}), strict=True
        )
    except ValidationError as error:
        place, sentence = explain(error)
        raise document.error(place, sentence) from None
