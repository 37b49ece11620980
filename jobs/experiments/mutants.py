"""Mutation test of kfac_core: breaks a copy of the library in one place at a time and runs its tests.

    make mutants        (python jobs/experiments/mutants.py results/mutants.md)

Works in temporary folders. The same tests must pass on the unbroken copy; a mutation whose text is not
found exactly once is an error. Exits with 1 if a mutant survives.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("kfac_core", "tests", "pyproject.toml")
TESTS = [
    f"tests/kfac_core/test_{name}.py"
    for name in ("conventions", "packing", "around", "strategies", "exactness")
]
SELECTED = "not dense_reference or 2]"  # of the dense comparisons, those of two ranks
LIMIT_SECONDS = 900
SURVIVED = "**SURVIVED**"


class Mutant(NamedTuple):
    """One place to break: `text` in `kfac_core/<path>`, found exactly once, becomes `broken`."""

    name: str
    path: str
    text: str
    broken: str


# The first nine were also applied to another package, whose tests let eight of them survive.
MUTANTS = (
    Mutant(
        "conv G times 1e6", "layers/convolution.py",
        "return pixel_gram(self._batched(gradients), self.module.groups)",
        "return pixel_gram(1e3 * self._batched(gradients), self.module.groups)",
    ),
    Mutant(
        "conv A with its patch reversed", "layers/convolution.py",
        "total = patch_gram(images, geometry)", "total = patch_gram(images, geometry).flip(1, 2)",
    ),
    Mutant(
        "eigen preconditions by 2 * gradient", "solvers/eigen.py",
        "multiply(multiply(views.q_g, projected), views.q_at, out)", "out.copy_(2 * gradient)",
    ),
    Mutant(
        "inverse preconditions by 2 * gradient", "solvers/inverse.py",
        "multiply(multiply(views.g, gradient), views.a.mT, out)", "out.copy_(2 * gradient)",
    ),
    Mutant(
        "multiplies by (dg da + damping)", "solvers/eigen.py",
        "projected.div_(torch.addcmul(damping, views.d_g, views.d_a))",
        "projected.mul_(torch.addcmul(damping, views.d_g, views.d_a))",
    ),
    Mutant(
        "running mean's weights swapped", "factors.py",
        "return self._config.factor_decay", "return 1.0 - self._config.factor_decay",
    ),
    Mutant(
        "kl-clip is the constant 0.123", "gradients/kl_clip.py",
        "(size * (lr**2 / kl_clip)).rsqrt().clamp_max(1.0)", "0.123",
    ),
    Mutant(
        "no damping on G (inverse)", "second_order.py",
        'factor_damping(damping, *(means if job.kind == "a" else means[::-1]))',
        'factor_damping(damping, *means) if job.kind == "a" else 0.0',
    ),
    Mutant(
        "every rank computes every G", "placement/strategies/comm_opt.py",
        "[(g,) for g in workers[1::2]]", "[tuple(range(world_size))] * len(layers)",
    ),
    Mutant(
        "each rank solves G without being its worker", "second_order.py",
        "self.own = [job for job in jobs if rank in job.inverse_workers]",
        'self.own = [job for job in jobs if job.kind == "g" or rank in job.inverse_workers]',
    ),
    Mutant(
        "A without 1 / S^2", "capture/statistics.py",
        "Share(call.a_gram, 1.0 / call.positions**2)", "Share(call.a_gram, 1.0)",
    ),
    Mutant(
        "G without S", "capture/statistics.py",
        "Share(call.g_gram, call.positions)", "Share(call.g_gram, 1.0)",
    ),
    Mutant("G without B", "capture/statistics.py", "float(self._batch) ** 2 if", "float(self._batch) if"),
    Mutant(
        "members of a row in the wrong order", "placement/placement.py",
        "return tuple(range(index * self.columns, (index + 1) * self.columns))",
        "return tuple(reversed(range(index * self.columns, (index + 1) * self.columns)))",
    ),
    Mutant(
        "pack loses the diagonal", "kernels/packing.py",
        "block[..., 1:, :] += lower.tril_()", "block[..., 1:, :] += lower.tril_(-1)",
    ),
    Mutant(
        "bias column at the wrong end", "layers/layer.py",
        "[matrix[..., :-1], matrix[..., -1]]", "[matrix[..., 1:], matrix[..., 0]]",
    ),
    Mutant(
        "factors averaged over ranks besides examples", "factors.py",
        "weight = (1.0 - decay) / float(count)",
        "weight = (1.0 - decay) / float(count) / self._communicator.world_size",
    ),
    Mutant(
        "second-order data never renewed", "preconditioner.py",
        'self._due("inverse_update_steps") or self._must_solve',
        "self.steps == 0 or self._must_solve",
    ),
    Mutant(
        "dp_kfac with factors of the global batch", "placement/strategies/dp_kfac.py",
        "factor_workers=layer.gradient_workers,", "factor_workers=layer.factor_workers,",
    ),
    Mutant(
        "damping added to the running factor", "solvers/inverse.py",
        "damped.diagonal(dim1=-2, dim2=-1).add_(damping)",
        "factor.diagonal(dim1=-2, dim2=-1).add_(damping); damped.copy_(factor)",
    ),
    Mutant("kl-clip scales up", "gradients/kl_clip.py", ".rsqrt().clamp_max(1.0)", ".rsqrt()"),
    Mutant("kl-clip with lr, not its square", "gradients/kl_clip.py", "(lr**2 / kl_clip)", "(lr / kl_clip)"),
    Mutant(
        "running factors start at zero", "factors.py",
        "identity = torch.eye(job.shape.dim, device=like.device)",
        "identity = torch.zeros(job.shape.dim, job.shape.dim, device=like.device)",
    ),
    Mutant(
        "factors listen in every step", "preconditioner.py",
        'is_active=lambda: not self._paused and self._due("factor_update_steps")', "is_active=lambda: True",
    ),
    Mutant(
        "pi upside down", "solvers/inverse.py",
        "damping * own_mean.clamp_min(tiny) / other_mean.clamp_min(tiny)",
        "damping * other_mean.clamp_min(tiny) / own_mean.clamp_min(tiny)",
    ),
    Mutant(
        "no lower bound of eigenvalues", "solvers/eigen.py",
        "SMALLEST_EIGENVALUE = 1e-10", "SMALLEST_EIGENVALUE = 0.0",
    ),
    Mutant(
        "tables of odd sizes are one column off", "kernels/packing_tables.py",
        "+ high - lead + 1 - shift", "+ high - lead",
    ),
    Mutant(
        "a frozen layer's passes count", "capture/hooks.py",
        "if not module.weight.requires_grad:", "if False:",
    ),
    Mutant(
        "a batch that is discarded stays", "preconditioner.py",
        "        self._capture.clear()\n        with self._timer", "        with self._timer",
    ),
)  # fmt: skip


def main() -> int:
    """Run the tests on the whole library, then on every mutant; print and write the table."""
    for mutant in MUTANTS:
        _check(mutant)
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(_first_failure, None)
        results = []
        for mutant, failure in zip(MUTANTS, pool.map(_first_failure, MUTANTS), strict=True):
            results.append(failure or SURVIVED)
            print(f"{mutant.name}: {results[-1]}", flush=True)
    if failure := whole.result():
        sys.exit(f"the tests fail on the library as it is, so they say nothing of mutants: {failure}")
    survivors = results.count(SURVIVED)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(_table(results))
    print(f"{len(MUTANTS) - survivors} of {len(MUTANTS)} killed")
    return bool(survivors)


def _check(mutant: Mutant) -> None:
    found = (ROOT / "kfac_core" / mutant.path).read_text().count(mutant.text)
    if found != 1:
        place = f"{found} times in kfac_core/{mutant.path}, needed once"
        sys.exit(f"mutant {mutant.name!r}: its text is {place}: {mutant.text}")


def _first_failure(mutant: Mutant | None) -> str | None:
    """The test that fails first on the mutated copy, None if none does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in COPIED:
            source = ROOT / part
            if source.is_dir():
                shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / part)
        if mutant is not None:
            target = folder / "kfac_core" / mutant.path
            target.write_text(target.read_text().replace(mutant.text, mutant.broken))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-k",
            SELECTED,
            *TESTS,
        ]
        environment = {**os.environ, "CI": "true"}  # hypothesis: the same examples each time, no deadline
        try:
            run = subprocess.run(
                command,
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=LIMIT_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no end in {LIMIT_SECONDS} s"
    if run.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) \S*?/?(test_\w+\.py(?:::\S+)?)", run.stdout, re.MULTILINE)
    if failed is None:
        sys.exit(
            f"pytest ended with {run.returncode} and names no test:\n{run.stdout[-2000:]}{run.stderr[-2000:]}"
        )
    return f"`{failed[1]}`"


def _table(results: list[str]) -> str:
    lines = ["| | mutant | in `kfac_core/` | first test that fails |", "|---|---|---|---|"]
    for number, (mutant, result) in enumerate(zip(MUTANTS, results, strict=True), 1):
        lines.append(f"| {number} | {mutant.name} | `{mutant.path}` | {result} |")
    killed = len(results) - results.count(SURVIVED)
    head = (
        f"# Mutants of kfac_core\n\nWritten by `make mutants`: {killed} of {len(results)} die. "
        f"Tests, in this order, up to the first failure, with `-k '{SELECTED}'`: "
        f"{', '.join(f'`{test}`' for test in TESTS)}.\n"
        "The first nine are those of which eight survive the 175 tests of gpauloski/kfac-pytorch 869cf11.\n\n"
    )
    return head + "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
