"""The cases of `compare_peers.py`: each peer's variants as released, and with one convention switched.

A switch is named after the convention that it changes, on one side only:

    gp_factor_scale   ours: A and G divided as gpauloski divides them (its product A (x) G is 1/(N^2 T^5) of
                      KFC's on a convolution, 1/N^2 on a Linear, with N the LOCAL batch, T output positions)
    global_batch      ours: the same with N the global batch; shows that gpauloski's N is the local one
    lz_token_mean     ours: G of a Linear on sequences from the mean over tokens, not the sum
    same_decay        ours: lzhangbv's factor_decay, which there is the weight of the NEW factor
    first_start       ours: running factors start at the first statistics, not at the identity
    no_floor          ours: eigenvalues clamped at 0 as gpauloski clamps them, not at 1e-10
    copied_damping    lzhangbv: damping added to a copy of the factor instead of into the running factor
    double_solve      gpauloski: decompositions and inverses in the model's dtype instead of float32
    no_prediv         gpauloski: compute_eigenvalue_outer_product=False
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        variant: the peer's own name of what it runs.
        options: our `KFACConfig` beyond the shared hyperparameters.
        switches: conventions switched, see the module.
        agrees: whether the two are expected to agree.
        explanation: why they do, or do not, with the peer's line.
    """

    model: str
    peer: str
    variant: str
    options: dict[str, Any]
    switches: tuple[str, ...] = ()
    agrees: bool = True
    explanation: str = "same arithmetic"
    loss: str = "mean"
    dtypes: tuple[str, ...] = ("float32", "float64")
    worlds: tuple[int, ...] = (1, 2, 4)
    factor_decay: float = 0.8  # weight of the OLD factor; 10 updates leave 0.8^10 = 11 % of the identity
    damping: float | Callable[[int], float] = 0.003
    peer_options: dict[str, Any] = field(default_factory=dict)


def cases(peer: str) -> list[Case]:
    """Every case of a peer, in the order of the table."""
    return list({"lzhangbv": _lzhangbv, "gpauloski": _gpauloski}[peer]())


def _lzhangbv() -> Iterator[Case]:
    ours = {
        "eigen": {"strategy": "mpd_kfac", "solver": "eigen"},
        "eigen_dp": {"strategy": "dp_kfac", "solver": "eigen", "assignment": "round_robin"},
        "inverse": {"strategy": "mpd_kfac", "solver": "inverse_pi"},
        "inverse_dp": {"strategy": "dp_kfac", "solver": "inverse_pi", "assignment": "round_robin"},
    }
    for model in ("linear", "conv", "conv_bn"):
        for variant in ("eigen", "eigen_dp"):
            yield Case(model, "lzhangbv", variant, ours[variant])
    yield Case(
        "conv_bn", "lzhangbv", "eigen", {"strategy": "comm_opt", "solver": "eigen"}, worlds=(4,),
        explanation="same arithmetic: who decomposes what leaves no trace",
    )  # fmt: skip
    accumulates = (
        "accumulated damping: kfac_preconditioner_inv.py, _add_value_to_diagonal is add_ on the factor"
    )
    for model in ("linear", "conv"):
        for variant in ("inverse", "inverse_dp"):
            base = Case(model, "lzhangbv", variant, ours[variant])
            yield replace(base, agrees=False, explanation=accumulates)
            yield replace(
                base, switches=("copied_damping",), explanation="agrees once damping is added to a copy"
            )
    base = Case("conv", "lzhangbv", "eigen", ours["eigen"], worlds=(1,))
    yield replace(
        base, switches=("same_decay",), agrees=False,
        explanation="meaning of factor_decay: utils.py, update_running_avg is alpha*new + (1-alpha)*old",
    )  # fmt: skip
    yield replace(
        base, switches=("first_start",), agrees=False,
        explanation="identity start: kfac_preconditioner_inv.py, _compute_factors sets diag(ones) at step 0",
    )  # fmt: skip
    tokens = Case("tokens", "lzhangbv", "eigen", {**ours["eigen"], "sequence": "reduce"}, worlds=(1, 2))
    yield replace(
        tokens, agrees=False,
        explanation="tokens: utils.py, ComputeG.linear takes torch.mean(g, 1); KFAC-reduce adds gradients up",
    )  # fmt: skip
    yield replace(tokens, switches=("lz_token_mean",), explanation="agrees once G is divided by tokens^2")


def _gpauloski() -> Iterator[Case]:
    ours = {
        "comm": {"strategy": "comm_opt"},
        "mem": {"strategy": "mem_opt"},
        "hybrid": {"strategy": "hybrid_opt", "grad_worker_fraction": 0.5},
    }
    scale = "factor scale: layers/modules.py, get_g_factor never undoes the batch mean"
    scale_conv = f"{scale}, and get_a_factor, get_g_factor divide by the positions once too often or wrongly"
    for variant, options in ours.items():
        for method in ("eigen", "inverse"):
            base = Case(
                "linear",
                "gpauloski",
                f"{variant} {method}",
                {**options, "solver": method},
                dtypes=("float32",),
            )
            yield replace(
                base,
                loss="sum",
                explanation="same arithmetic under a summed loss, where gp's Linear scale is right",
            )
            yield replace(base, agrees=False, explanation=scale)
            yield replace(
                base, switches=("gp_factor_scale",), explanation="agrees with gp's scale in our factors"
            )
    for model in ("conv", "conv_bn"):
        base = Case(
            model, "gpauloski", "comm eigen", {**ours["comm"], "solver": "eigen"}, dtypes=("float32",)
        )
        yield replace(base, agrees=False, explanation=scale_conv)
        yield replace(
            base, switches=("gp_factor_scale",), explanation="agrees with gp's scale in our factors"
        )
    linear = Case(
        "linear", "gpauloski", "comm eigen", {**ours["comm"], "solver": "eigen"}, dtypes=("float32",)
    )
    yield replace(
        linear, worlds=(2, 4), switches=("gp_factor_scale", "global_batch"), agrees=False,
        explanation="world size: their N is the local batch, so G grows as ranks^2 at a fixed global batch",
    )  # fmt: skip
    double = replace(linear, loss="sum", worlds=(1,), dtypes=("float64",))
    yield replace(
        double, agrees=False,
        explanation="float32: layers/eigen.py, compute_a_inv decomposes .to(torch.float32) in any case",
    )  # fmt: skip
    for method in ("eigen", "inverse"):
        yield replace(
            double, variant=f"comm {method}", options={**ours["comm"], "solver": method}, worlds=(1, 2),
            switches=("double_solve",), explanation="agrees in float64 once they decompose in float64",
        )  # fmt: skip
    one = replace(linear, loss="sum", worlds=(1,), factor_decay=0.05)
    double_one = replace(one, dtypes=("float64",))
    yield replace(
        double_one, model="faint", switches=("double_solve",), damping=1e-12, agrees=False,
        explanation="eigenvalue floor: they clamp at 0, we at 1e-10 as the SC20 code; shows below it",
    )  # fmt: skip
    yield replace(
        double_one, model="faint", switches=("double_solve", "no_floor"), damping=1e-12,
        explanation="agrees with our floor at 0",
    )  # fmt: skip
    falling = replace(linear, loss="sum", worlds=(1,), damping=_falling_damping)
    yield replace(
        falling, agrees=False,
        explanation="prediv: layers/eigen.py, compute_g_inv freezes 1/(dg da + damping) between inverses",
    )  # fmt: skip
    yield replace(falling, switches=("no_prediv",), explanation="agrees when damping enters at each step")
    yield replace(
        linear, loss="sum", worlds=(1,), options={**linear.options, "skip": (r"0$",)},
        peer_options={"skip_layers": ["^0$"]},
        explanation="same arithmetic: a skipped layer is outside the kl-clip sum in both",
    )  # fmt: skip


def _falling_damping(step: int) -> float:
    """Halves at steps 6 and 14, between two inverse updates."""
    return 0.01 * 0.5 ** ((step >= 6) + (step >= 14))
