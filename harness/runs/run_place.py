"""How and where an attempt ran, or would run; a run that moves mixes the times of two machines."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict

from harness.runs.store import Attempt
from harness.runs.stored_files import STRICT


@dataclass(frozen=True)
class LaunchFacts:
    """What readers below the launchers need of `launch.json`; `harness.launchers.launch` has all of it.

    Attributes:
        launcher: `local` or `slurm`.
        site: the site's profile, or its name.
        oversubscribed: whether there were more ranks than CPUs.
        host: on which it was submitted.
        allocation: name of the allocation that several runs shared.
    """

    __pydantic_config__ = ConfigDict(**{**STRICT, "extra": "ignore"})
    launcher: str = ""
    site: dict[str, Any] | str | None = None
    oversubscribed: bool = False
    host: str = ""
    allocation: str | int | None = None


@dataclass(frozen=True)
class RunPlace:
    """A place; an empty text stands for what is not known.

    Attributes:
        site: name of the profile.
        launcher: `local` or `slurm`.
        nodes: which nodes of a cluster: partition and constraint.
        cpu: model of the CPUs.
        device: `cpu`, or the GPU's name.
    """

    site: str = ""
    launcher: str = ""
    nodes: str = ""
    cpu: str = ""
    device: str = ""

    @classmethod
    def of_attempt(cls, attempt: Attempt) -> Self:
        """Where the attempt ran, as its files say.

        Raises:
            StoredFileError: one of them is damaged.
        """
        launch = attempt.read("launch.json") or {}
        environment = attempt.read("environment.json") or {}
        profile = launch.get("site")
        site: Mapping[str, Any] = profile if isinstance(profile, dict) else {"name": profile or ""}
        slurm = site.get("slurm") if launch.get("launcher") == "slurm" else None
        cpu, device = (str(environment.get(name) or "") for name in ("cpu", "device"))
        return cls(str(site.get("name", "")), str(launch.get("launcher", "")), _nodes(slurm), cpu, device)

    @classmethod
    def planned(cls, site: Mapping[str, Any]) -> Self:
        """Where an attempt on `site`, a profile as plain values, would run from this host."""
        launcher = str(site["launcher"])
        on_gpu = bool(site.get("gpus_per_rank"))
        cpu = cpu_model() if launcher == "local" else ""
        nodes = _nodes(site.get("slurm")) if launcher == "slurm" else ""
        return cls(str(site["name"]), launcher, nodes, cpu, "" if on_gpu else "cpu")

    def changes(self, later: Self) -> list[str]:
        """What is known of both and differs, such as `launcher from slurm to local`."""
        pairs = ((one.name, getattr(self, one.name), getattr(later, one.name)) for one in fields(self))
        return [f"{name} from {old} to {new}" for name, old, new in pairs if old and new and old != new]


def place_changes(attempt: Attempt) -> list[str]:
    """What changed between the attempts of one run, up to this one, each change once.

    Raises:
        StoredFileError: one of their files is damaged.
    """
    places = [RunPlace.of_attempt(one) for one in reversed(attempt.lineage())]
    return list(dict.fromkeys(change for old, new in pairwise(places) for change in old.changes(new)))


def cpu_model() -> str:
    """Model of this host's CPUs."""
    return _cpu_field("model name") or platform.processor()


def has_native_bfloat16() -> bool | None:
    """Whether this host's CPUs multiply bfloat16 in hardware; None where the system does not say.

    Without AVX-512 BF16 or AMX on x86, or BF16 on ARM, PyTorch emulates every product: a step took
    7 to 20 times as long as in float32 on an AMD EPYC of Zen 3.
    """
    flags = _cpu_field("flags", "Features").split()
    return bool({"avx512_bf16", "amx_bf16", "bf16"}.intersection(flags)) if flags else None


def _cpu_field(*names: str) -> str:
    """The first of these fields in /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    fields = (line.split(":", 1) for line in lines if ":" in line)
    return next((value.strip() for name, value in fields if name.strip() in names), "")


def _nodes(slurm: Mapping[str, Any] | None) -> str:
    parts = ((name, (slurm or {}).get(name)) for name in ("partition", "constraint"))
    return ", ".join(f"{name} {value}" for name, value in parts if value)
