"""Shampoo as pytorch-optimizer has it, with roots that short runs see and a state that can be saved.

The library computes inverse roots every 1,000 steps, before which its update is that of SGD with momentum,
and keeps objects in its state that a checkpoint cannot hold. Google's distributed Shampoo, which it follows
(arXiv:2002.09018), recommends intervals of 1 to 100 steps for roots.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from pytorch_optimizer import ScalableShampoo
from torch import Tensor, nn

ROOT_INTERVAL = 10  # steps
_MATRICES = ("statistics", "pre_conditioners")


class Shampoo(ScalableShampoo):
    """ScalableShampoo with a root interval of `ROOT_INTERVAL` steps, from step 25 on grafted onto SGD.

    Args:
        parameters: what to train.
        lr: learning rate.
        weight_decay: factor of the L2 penalty.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(
            parameters, lr=lr, weight_decay=weight_decay, preconditioning_compute_steps=ROOT_INTERVAL
        )

    def state_dict(self) -> dict[str, Any]:
        """The state as torch's optimizers have it: tensors and numbers only."""
        saved = super().state_dict()
        saved["state"] = {index: _tensors(state) for index, state in saved["state"].items()}
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state back in place of this one.

        Raises:
            ValueError: the parameters have other groups or other shapes.
        """
        super().load_state_dict({**state_dict, "state": {}})
        parameters = [p for group in self.param_groups for p in group["params"]]
        self.state.clear()
        for index, saved in state_dict["state"].items():
            parameter = parameters[index]
            self.state[parameter] = self._empty_state(parameter)
            for name, own in _tensors(self.state[parameter]).items():
                _copy(own, saved[name], f"{name} of parameter {index}")

    def _empty_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """What the library begins with for a parameter; it makes that for one with a gradient."""
        gradient, parameter.grad = parameter.grad, torch.zeros_like(parameter)
        group = next(g for g in self.param_groups if any(p is parameter for p in g["params"]))
        self.init_group({**group, "params": [parameter]})
        parameter.grad = gradient
        return dict(self.state[parameter])


def _tensors(state: dict[str, Any]) -> dict[str, Tensor | list[Tensor]]:
    """The tensors of a parameter's state, by name: the state's own, and not copies."""
    matrices = {name: getattr(state["pre_conditioner"], name) for name in _MATRICES}
    return {"momentum": state["momentum"], "graft_momentum": state["graft"].momentum, **matrices}


def _copy(own: Tensor | list[Tensor], saved: Tensor | list[Tensor], what: str) -> None:
    if isinstance(own, Tensor) and isinstance(saved, Tensor) and own.shape == saved.shape:
        own.copy_(saved)
    elif isinstance(own, list) and isinstance(saved, list) and len(own) == len(saved):
        for mine, theirs in zip(own, saved, strict=True):
            _copy(mine, theirs, what)
    else:
        raise ValueError(f"Shampoo's state does not fit: {what} has another shape than in this model")
