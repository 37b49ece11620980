"""`python -m harness.bench gpu`: steps with K-FAC beside plain training, network by network, on one GPU.

It needs a Python with torch, numpy and, for BERT, transformers. Every arm is measured in turn with a replica
that trains plainly, because a GPU's clocks drift. What was measured is on disk at once, and is not measured
again by the same code on the same device.
"""

from __future__ import annotations

import gc
import hashlib
import json
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.bench.core import amortised
from harness.bench.peers import PEERS
from harness.errors import UserError
from harness.workloads.models.language import bert
from harness.workloads.models.vision import cifar_resnet, resnet32, resnet50
from kfac_core import KFAC, KFACConfig, Phase
from kfac_core.matmul import tf32_products
from kfac_core.timing import PhaseTimer, WindowTotals

ROOT = Path(__file__).parents[2]
INTERVALS = 10, 100
KINDS: Mapping[str, int] = {"full": 0, "factor": 10, "plain": 1}
"""Kinds of step, each with a step number at which it is due."""

ROUNDS, WINDOW = 5, {"full": 1, "factor": 3, "plain": 10}
"""Rounds of an arm; steps of each kind in a round, between two waits for the device."""


class Network(NamedTuple):
    """What is trained: examples, and the side of an image or the tokens of a sequence."""

    name: str
    examples: int
    size: int


NETWORKS: Mapping[str, Network] = {
    "ResNet-50, batch 64": Network("resnet50", 64, 224),
    "BERT-base, 32 x 512 tokens": Network("bert", 32, 512),
    "ResNet-32, batch 128": Network("resnet32", 128, 32),
    "ResNet-32, batch 512": Network("resnet32", 512, 32),
    "BERT-base, 32 x 128 tokens": Network("bert", 32, 128),
}
SMALL: Mapping[str, Network] = {
    "a small ResNet": Network("small", 4, 16), "a small BERT": Network("small-bert", 2, 8)
}  # fmt: skip
"""For a rehearsal on a CPU."""

_IMAGE_NETWORKS: Mapping[str, Callable[[], nn.Module]] = {
    "resnet32": resnet32, "resnet50": resnet50, "small": partial(cifar_resnet, 8, 10, 8)
}  # fmt: skip
_BERT_OPTIONS = {"dropout": 0.0, "tied": False, "positions": 512}
_BERT_BASE = {"layers": 12, "hidden": 768, "heads": 12, "vocabulary": 30522}
_BERT_SMALL = {"layers": 1, "hidden": 16, "heads": 2, "vocabulary": 64}


@dataclass(frozen=True)
class GPUBench:
    """What to measure, and where to write it.

    Attributes:
        device: `cuda`, or `cpu` for a rehearsal on small networks.
        minutes: what has not begun by then is left to the next run.
        out: folder of `<device>.json` and `<device>.md`.
        peers: checkouts by the name of a public K-FAC package, to measure beside.
    """

    device: str
    minutes: float
    out: Path
    peers: Mapping[str, str]

    def run(self, say: Callable[[str], None]) -> bool:
        """Measure what is not on disk; returns whether everything is now.

        Raises:
            UserError: torch sees no such device.
        """
        if self.device == "cuda" and not torch.cuda.is_available():
            raise UserError(f"torch {torch.__version__} sees no CUDA device; --device cpu rehearses")
        ends = time.monotonic() + 60 * self.minutes
        device = torch.device(self.device)
        machine = _machine(device)
        path = self.out / f"{re.sub('[^a-z0-9]+', '-', machine['device'].lower()).strip('-')}.json"
        found = _kept(path, machine)
        longest = 0.0
        for name, arm in self._all():
            if arm in found["networks"].setdefault(name, {}):
                continue
            if time.monotonic() + longest > ends:
                say(f"no time left for {name}, {arm}: the same command goes on from there")
                return False
            began = time.monotonic()
            with tf32_products(torch.empty(0, device=device), allowed=True):
                row = self._measured(device, {**NETWORKS, **SMALL}[name], arm)
            found["networks"][name][arm] = row
            longest = max(longest, time.monotonic() - began)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found, indent=1) + "\n")
            path.with_suffix(".md").write_text(page(found))
            ratio = row.get("of_plain", {}).get("median")
            say(f"{name}, {arm}: {row['failed'] if ratio is None else f'{ratio:.3f} of plain training'}")
        say(f"everything is in {path.with_suffix('.md')}")
        return True

    def _all(self) -> Iterator[tuple[str, str]]:
        """Networks and arms; our own first, should the time end."""
        names = NETWORKS if self.device == "cuda" else SMALL
        arms = [f"{who} {solver}" for who in self.peers for solver in ("inverse", "eigen")]
        for own in (["inverse", "eigen"], arms):
            yield from ((name, arm) for name in names for arm in own)

    def _measured(self, device: torch.device, network: Network, arm: str) -> dict[str, Any]:
        """One arm's rows, or why it cannot run: a peer, or too large a network."""
        who, _, solver = arm.rpartition(" ")
        try:
            base = _allocated(device)
            steps = Steps(device, network, solver, who, self.peers.get(who, ""))
            steps.run("full", 2)
            peak = torch.cuda.max_memory_allocated() - base if device.type == "cuda" else 0
            rounds = _rounds(steps, Steps(device, network))
            return {**rounds, "peak_bytes": peak, "phases": _phases(steps) if not who else {}}
        except Exception as error:
            if not who and not isinstance(error, ModuleNotFoundError | torch.OutOfMemoryError):
                raise
            return {"failed": f"{type(error).__name__}: {error}"}


class Steps:
    """A replica that takes training steps with SGD, on one fixed batch.

    Args:
        solver: of K-FAC; empty for plain training.
        who: a peer that preconditions in our K-FAC's place, from a checkout.
        ranges: whether a profiler sees the phases.
    """

    def __init__(
        self,
        device: torch.device,
        network: Network,
        solver: str = "",
        who: str = "",
        checkout: str = "",
        *,
        ranges: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self._device, self.timer = device, PhaseTimer(device, ranges=ranges)
        with torch.device(device):
            self.model, self._loss, skip = (_bert if "bert" in network.name else _of_images)(network)
        fused = {"fused": True} if device.type == "cuda" else {}
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6, momentum=0.9, **fused)
        self._prepare: Callable[[int], object] = lambda step: None
        self._precondition: Callable[[], object] = lambda: None
        if who:
            self._prepare, self._precondition = PEERS[who](checkout, solver, self.model, skip, INTERVALS)
        elif solver:
            config = KFACConfig(
                solver=solver, skip=skip, factor_update_steps=INTERVALS[0], inverse_update_steps=INTERVALS[1]
            )
            kfac = KFAC(self.model, config, lr=0.1, timer=self.timer)
            self._prepare, self._precondition = partial(setattr, kfac, "steps"), kfac.step

    def run(self, kind: str = "plain", steps: int = 1) -> float:
        """Seconds of so many steps of a kind, from an idle device to an idle device."""
        self._wait()
        began = time.perf_counter()
        for _ in range(steps):
            self._step(kind)
        self._wait()
        return time.perf_counter() - began

    def timed(self, kind: str, steps: int = 1) -> WindowTotals:
        """The phase timer's totals of so many steps."""
        self.timer.start()
        for _ in range(steps):
            self.timer.step(kind)
            self._step(kind)
        self.timer.stop()
        return self.timer.drain()

    def _step(self, kind: str) -> None:
        self._prepare(KINDS[kind])
        self._optimizer.zero_grad()
        with self.timer.phase(Phase.FORWARD):
            loss = self._loss()
        with self.timer.phase(Phase.BACKWARD):
            loss.backward()
        self._precondition()
        with self.timer.phase(Phase.UPDATE):
            self._optimizer.step()

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


Subject = tuple[nn.Module, Callable[[], Tensor], tuple[str, ...]]
"""A network, its loss on a fixed batch, and the layers that K-FAC leaves out."""


def _bert(network: Network) -> Subject:
    options = _BERT_SMALL if network.name == "small-bert" else _BERT_BASE
    model = bert({**_BERT_OPTIONS, **options, "sequence_length": network.size})
    tokens = torch.randint(0, options["vocabulary"], (network.examples, network.size))
    labels = tokens.roll(1).flatten()

    def loss() -> Tensor:
        return functional.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), labels)

    return model, loss, ("bert.embeddings", "cls")  # as in the KAISA paper's release


def _of_images(network: Network) -> Subject:
    model, images = _IMAGE_NETWORKS[network.name](), torch.randn(network.examples, 3, *2 * (network.size,))
    labels = torch.arange(network.examples) % 10
    return model, lambda: functional.cross_entropy(model(images), labels), ()


def _rounds(steps: Steps, plain: Steps) -> dict[str, Any]:
    """Seconds of each kind of step, and of an amortised step over plain training, by rounds."""
    rounds = ROUNDS if steps._device.type == "cuda" else 1
    plain.run("plain", 3)
    for kind in KINDS:
        steps.run(kind)
    seconds: dict[str, list[float]] = {kind: [] for kind in ("without", *KINDS)}
    ratios: dict[str, list[float]] = {"of_plain": [], "of_plain_every_step": []}
    for _ in range(rounds):
        own = {kind: steps.run(kind, count) / count for kind, count in WINDOW.items()}
        own["without"] = plain.run("plain", 2 * WINDOW["plain"]) / (2 * WINDOW["plain"])
        for kind, value in own.items():
            seconds[kind].append(value)
        ratios["of_plain"].append(amortised(own, *INTERVALS) / own["without"])
        ratios["of_plain_every_step"].append(own["full"] / own["without"])
    return {name: _spread(values) for name, values in {**seconds, **ratios}.items()}


def _phases(steps: Steps) -> dict[str, dict[str, float]]:
    """Seconds by phase of each kind of step, medians of three."""
    found: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        windows = [steps.timed(kind).seconds for _ in range(3)]
        names = sorted({name for window in windows for name in window})
        found[kind] = {name: median(window.get(name, 0.0) for window in windows) for name in names}
    return found


def _allocated(device: torch.device) -> int:
    """Bytes, without what earlier replicas held; a new peak begins."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": median(values), "least": min(values), "most": max(values), "rounds": len(values)}


def _machine(device: torch.device) -> dict[str, Any]:
    """What identifies the results."""
    on_gpu = device.type == "cuda"
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "kfac_core").rglob("*.py"), Path(__file__)]):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return {
        "device": torch.cuda.get_device_name() if on_gpu else "rehearsal on a CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": asked.stdout.strip() or None,
        "source": digest.hexdigest()[:12],
        "precision": "float32; convolutions and products of the network in TF32" if on_gpu else "float32",
    }


def _kept(path: Path, machine: Mapping[str, Any]) -> dict[str, Any]:
    """What is on disk, if the same code on the same device has measured it."""
    if path.exists():
        found: dict[str, Any] = json.loads(path.read_text())
        if all(found["machine"][key] == machine[key] for key in ("device", "torch", "source")):
            return found
    return {"machine": dict(machine), "networks": {}}


def page(found: Mapping[str, Any]) -> str:
    """The page of a device: ratios first, then seconds by phase."""
    machine = found["machine"]
    columns = (
        "network", "", "plain training, ms", "over plain training", "if every step is full",
        *(f"{kind} step, ms" for kind in KINDS), "peak, GB",
    )  # fmt: skip
    lines = [
        f"# Steps with K-FAC on one {machine['device']}",
        "",
        f"torch {machine['torch']}, CUDA {machine['cuda']}, commit {machine['commit']};",
        f"{machine['precision']}. Factors every {INTERVALS[0]} steps, second-order every {INTERVALS[1]}.",
        "Ratios are medians of rounds, with the least and the most.",
        "",
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
    ]
    for name, arms in found["networks"].items():
        for arm, row in arms.items():
            if "failed" in row:
                lines.append(f"| {name} | {arm} | {row['failed']} | | | | | | |")
                continue
            ratio, every = row["of_plain"], row["of_plain_every_step"]
            cells = [
                f"{1e3 * row['without']['median']:.1f}",
                f"**{ratio['median']:.3f}** ({ratio['least']:.3f} to {ratio['most']:.3f})",
                f"{every['median']:.2f}",
                *(f"{1e3 * row[kind]['median']:.1f}" for kind in KINDS),
                f"{row['peak_bytes'] / 1e9:.1f}",
            ]
            lines.append(f"| {name} | {arm} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Milliseconds by phase",
        "",
        f"| network | | phase | {' | '.join(KINDS)} |",
        "|---" * 6 + "|",
    ]
    for name, arms in found["networks"].items():
        for arm, row in arms.items():
            phases = row.get("phases") or {kind: {} for kind in KINDS}
            for phase in sorted({phase for own in phases.values() for phase in own}):
                shown = (f"{1e3 * phases[kind].get(phase, 0.0):.2f}" for kind in KINDS)
                lines.append(f"| {name} | {arm} | {phase} | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"
