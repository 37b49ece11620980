"""NLCG number by number in plain Python: a reference that is independent of `kfac_core`.

Transcribed from arXiv:1812.02886 and its release with loops over floats; no torch, no shared table.
"""

from __future__ import annotations

from dataclasses import dataclass

Vector = list[float]
EPS = 1e-8


@dataclass
class ScalarSettings:
    lr: float
    beta: str = "FR"
    bfgs: bool = True
    control: bool = False
    restart_steps: int | None = None


class ScalarNLCG:
    """One `step` updates theta in place; `betas`, `rows` and `scale` record the decisions."""

    def __init__(self, theta: Vector, settings: ScalarSettings) -> None:
        self.theta, self.settings = theta, settings
        self.k, self.scale, self.delta = 0, 1.0, 0.0
        self.g_old = self.d = self.s = self.z_old = self.h = [0.0] * 0
        self.ema = self.ema_old = 0.0
        self.betas: list[float] = []
        self.rows: list[float] = []
        self.renewals = 0

    def step(self, g: Vector, loss: float = 1.0, z: Vector | None = None) -> None:
        """`z` is passed if a preconditioner other than BFGS computed it."""
        if z is None:
            z = self._precondition(g) if self.settings.bfgs else [-value for value in g]
        new = sum(-a * b for a, b in zip(g, z, strict=True))
        restart = self.settings.restart_steps is not None and self.k % self.settings.restart_steps == 0
        beta = 0.0 if self.k == 0 or restart else min(1.0, max(0.0, self.raw_beta(g, new)))
        self.betas.append(beta)
        d = [b + beta * old for b, old in zip(z, self.d or z, strict=True)]
        dropped = self._control(loss) if self.settings.control else 0.0
        s = [self.settings.lr * self.scale * value for value in d]
        if dropped > 0.0:
            s = [(1.0 - dropped) * now - dropped * before for now, before in zip(s, self.s, strict=True)]
        for i, value in enumerate(s):
            self.theta[i] += value
        self.g_old, self.z_old, self.d, self.s, self.delta = list(g), z, d, s, new
        self.k += 1

    def raw_beta(self, g: Vector, new: float) -> float:
        mid = sum(-a * b for a, b in zip(g, self.z_old, strict=True))
        d_y = sum(d * (a - b) for d, a, b in zip(self.d, g, self.g_old, strict=True))
        return {
            "FR": new / (self.delta + EPS),
            "PR": (new - mid) / (self.delta + EPS),
            "HS": (new - mid) / (d_y + EPS),
            "DY": new / (d_y + EPS),
        }[self.settings.beta]

    def _precondition(self, g: Vector) -> Vector:
        if self.k == 0:
            self.h = [1.0] * len(g)
        else:
            y = [a - b for a, b in zip(g, self.g_old, strict=True)]
            y_s = sum(a * b for a, b in zip(y, self.s, strict=True))
            s_h_s = sum(a * a * b for a, b in zip(self.s, self.h, strict=True))
            if y_s >= EPS and s_h_s >= EPS:
                self.renewals += 1
                self.h = [
                    abs(h - (h * s) ** 2 / s_h_s + change**2 / y_s)
                    for h, s, change in zip(self.h, self.s, y, strict=True)
                ]
        return [1.0 / (h + EPS) * -value for h, value in zip(self.h, g, strict=True)]

    def _control(self, loss: float) -> float:
        if self.k == 0:
            self.ema = self.ema_old = loss
            return 0.0
        self.ema = 0.7 * self.ema + 0.3 * loss
        if self.k % 5 != 0:
            return 0.0
        ratio, self.ema_old = self.ema / self.ema_old, self.ema
        if ratio < 1.01:
            self.scale = min(1.0, 1.05 * self.scale)
            self.rows.append(0.0)
            return 0.0
        if ratio > 1.15:
            shrink, dropped = 0.5, 0.9
        elif ratio > 1.125:
            shrink, dropped = 0.7, 0.7
        elif ratio > 1.10:
            shrink, dropped = 0.8, 0.5
        elif ratio > 1.075:
            shrink, dropped = 0.9, 0.3
        elif ratio > 1.05:
            shrink, dropped = 0.95, 0.2
        elif ratio > 1.025:
            shrink, dropped = 0.975, 0.1
        else:
            shrink, dropped = 1.0, 0.1
        self.rows.append(shrink)
        self.scale = max(1e-4, shrink * self.scale)
        return dropped
