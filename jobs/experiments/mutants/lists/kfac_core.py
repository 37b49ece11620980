"""Mutants of the library. The first nine were also applied to another package: eight survived its tests."""

from __future__ import annotations

from jobs.experiments.mutants.mutant import Mutant, Package

TESTS = tuple(
    f"tests/kfac_core/test_{name}.py"
    for name in ("conventions", "packing", "around", "strategies", "exactness")
)

_MUTANTS = (
    Mutant("conv G times 1e6", "layers/convolution.py",
           'images = self._batched(gradients)\n        if self.is_diagonal("g"):',
           'images = 1e3 * self._batched(gradients)\n        if self.is_diagonal("g"):'),
    Mutant("conv A with its patch reversed", "layers/convolution.py", "total = patch_gram(images, geometry)",
           "total = patch_gram(images, geometry).flip(1, 2)"),
    Mutant("eigen preconditions by 2 * gradient", "solvers/eigen.py",
           "multiply(multiply(views.q_g, projected), views.q_at, out)", "out.copy_(2 * gradient)"),
    Mutant("inverse preconditions by 2 * gradient", "solvers/inverse.py",
           "multiply(multiply(views.g, gradient), views.a.mT, out)", "out.copy_(2 * gradient)"),
    Mutant("multiplies by (dg da + damping)", "solvers/eigen.py",
           "return projected.div_(torch.addcmul(damping, first, second))",
           "return projected.mul_(torch.addcmul(damping, first, second))"),
    Mutant("running mean's weights swapped", "factor_update.py", "self._factors.decay = decay",
           "self._factors.decay = 1.0 - decay"),
    Mutant("kl-clip is the constant 0.123", "gradients/kl_clip.py",
           "(size * (lr**2 / kl_clip)).rsqrt().clamp_max(1.0)", "0.123"),
    Mutant("no damping on G (inverse)", "second_order.py",
           'factor_damping(damping, *(means if job.kind == "a" else means[::-1]))',
           'factor_damping(damping, *means) if job.kind == "a" else 0.0'),
    Mutant("every rank computes every G", "placement/strategies/comm_opt.py", "[(g,) for g in workers[1::2]]",
           "[tuple(range(world_size))] * len(layers)"),
    Mutant("each rank solves G without being its worker", "second_order.py",
           "self.own = [job for job in jobs if rank in job.inverse_workers]",
           'self.own = [job for job in jobs if job.kind == "g" or rank in job.inverse_workers]'),
    Mutant("A without 1 / S^2", "capture/statistics.py",
           'return 1.0 / (rows * more) if kind == "a" else more / terms',
           'return 1.0 / terms if kind == "a" else more / terms'),
    Mutant("G without S", "capture/statistics.py",
           'return 1.0 / (rows * more) if kind == "a" else more / terms',
           'return 1.0 / (rows * more) if kind == "a" else 1.0 / terms'),
    Mutant("G without B", "capture/statistics.py", "float(terms) ** 2 if", "float(terms) if"),
    Mutant("members of a row in the wrong order", "placement/placement.py",
           "return tuple(range(index * self.columns, (index + 1) * self.columns))",
           "return tuple(reversed(range(index * self.columns, (index + 1) * self.columns)))"),
    Mutant("pack loses the diagonal", "kernels/packing.py", "block[..., 1:, :] += lower.tril_()",
           "block[..., 1:, :] += lower.tril_(-1)"),
    Mutant("bias column at the wrong end", "layers/layer.py", "[matrix[..., :-1], matrix[..., -1]]",
           "[matrix[..., 1:], matrix[..., 0]]"),
    Mutant("factors averaged over ranks besides examples", "factors.py", "weight = (1.0 - decay) * scale",
           "weight = (1.0 - decay) * scale / self._communicator.world_size"),
    Mutant("second-order data never renewed", "preconditioner.py",
           'self._due("inverse_update_steps") or self._must_solve', "self.steps == 0 or self._must_solve"),
    Mutant("dp_kfac with factors of the global batch", "placement/strategies/dp_kfac.py",
           "factor_workers=layer.gradient_workers,", "factor_workers=layer.factor_workers,"),
    Mutant("damping added to the running factor", "solvers/inverse.py",
           "damped.diagonal(dim1=-2, dim2=-1).add_(damping)",
           "factor.diagonal(dim1=-2, dim2=-1).add_(damping); damped.copy_(factor)"),
    Mutant("kl-clip scales up", "gradients/kl_clip.py", ".rsqrt().clamp_max(1.0)", ".rsqrt()"),
    Mutant("kl-clip with lr, not its square", "gradients/kl_clip.py", "(lr**2 / kl_clip)", "(lr / kl_clip)"),
    Mutant("running factors start at zero", "factors.py",
           "identity = torch.eye(job.shape.dim, device=like.device)",
           "identity = torch.zeros(job.shape.dim, job.shape.dim, device=like.device)"),
    Mutant("factors listen in every step", "preconditioner.py",
           "is_active=lambda: not self._paused and self._renews_factors()", "is_active=lambda: True"),
    Mutant("pi upside down", "solvers/inverse.py",
           "damping * own_mean.clamp_min(tiny) / other_mean.clamp_min(tiny)",
           "damping * other_mean.clamp_min(tiny) / own_mean.clamp_min(tiny)"),
    Mutant("no lower bound of eigenvalues", "solvers/eigen.py", "SMALLEST_EIGENVALUE = 1e-10",
           "SMALLEST_EIGENVALUE = 0.0"),
    Mutant("no bound of unresolved eigenvalues", "solvers/eigen.py",
           "return torch.maximum(values, values.amax((-2, -1), keepdim=True) * (noise * UNRESOLVED))",
           "return values", ("tests/kfac_core/test_conditioning.py",)),
    Mutant("tables of odd sizes are one column off", "kernels/packing_tables.py", "+ high - lead + 1 - shift",
           "+ high - lead"),
    Mutant("a frozen layer's passes count", "layers/layer.py",
           "return bool(self.module.weight.requires_grad)", "return True"),
    Mutant("a batch that is discarded stays", "factor_update.py",
           "        self._capture.clear()\n        with self._timer", "        with self._timer"),
)  # fmt: skip

KFAC_CORE = Package(
    "kfac_core",
    tuple(one if one.tests else one._replace(tests=TESTS) for one in _MUTANTS),
    select="not dense_reference or 2]",  # of the dense comparisons, those of two ranks
    about="Tests, in this order: "
    + ", ".join(f"`{test}`" for test in TESTS)
    + "; of the dense comparisons those of two ranks. The first nine are those of which eight survive the "
    "175 tests of gpauloski/kfac-pytorch 869cf11.",
)
