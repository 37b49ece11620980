"""Whether a step's gradients overflowed under a GradScaler: one answer for all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor, nn

from kfac_core.collectives import Communicator
from kfac_core.gradients import all_finite, largest


@dataclass(frozen=True)
class HostCopy:
    """A few numbers on their way from the device to the host, as whether a step overflowed."""

    flag: Tensor
    copied: torch.cuda.Event | None

    def read(self) -> bool:
        """Whether the number is not zero; waits until the device has reached the step."""
        self._arrive()
        return float(self.flag) != 0.0

    def numbers(self) -> list[list[float]]:
        """The rows of a matrix; waits in the same way."""
        self._arrive()
        return [[float(number) for number in row.unbind()] for row in self.flag.unbind()]

    def _arrive(self) -> None:
        if self.copied is not None and not self.copied.query():
            self.copied.synchronize()


class Overflow:
    """Asks the GradScaler, or the gradients themselves, and all ranks of the communicator.

    A rank whose own gradients are finite, as parameters outside DistributedDataParallel can make it, would
    wait in K-FAC's collectives for one that skips the step. The answer is given back to the scaler, so that
    all ranks' optimizers skip the step too.
    """

    def __init__(self, scaler: torch.amp.GradScaler, communicator: Communicator, like: Tensor) -> None:
        self._scaler, self._communicator, self._like = scaler, communicator, like

    def scale(self) -> Tensor:
        """The loss scale, on the device."""
        scaled = self._scaler.scale(self._like.new_ones((), dtype=torch.float32))
        assert isinstance(scaled, Tensor)  # noqa: S101  one tensor in, one out
        return scaled

    def on_host(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether a gradient of any rank is not finite; waits for the device."""
        found = not all_finite(parameters)
        if self._communicator.world_size > 1:
            found = bool(self._joint(self._like.new_full((1,), float(found))) != 0)
        return found

    def on_device(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The same as a tensor that is not zero, without waiting."""
        reported = self._reported()
        if reported:
            flag = torch.stack([each.reshape(()) for each in reported]).sum().to(self._like.dtype)
        else:
            sizes = largest(parameter.grad for parameter in parameters if parameter.grad is not None)
            flag = (sizes < inf).logical_not().to(self._like)
        flag = flag.reshape(1)
        return self._joint(flag) if self._communicator.world_size > 1 else flag

    def _joint(self, flag: Tensor) -> Tensor:
        self._communicator.all_reduce(flag)
        for reported in self._reported():
            reported.add_(flag.reshape(reported.shape).to(reported.dtype))
        return flag

    def _reported(self) -> list[Tensor]:
        """What `GradScaler.unscale_` found, by optimizer and device; empty where it was not called."""
        states = getattr(self._scaler, "_per_optimizer_states", {})
        return [
            found for state in states.values() for found in state.get("found_inf_per_device", {}).values()
        ]


def copy_to_host(flag: Tensor) -> HostCopy:
    """Start to copy a flag to the host."""
    copied = None
    host = flag.to("cpu", non_blocking=True)  # into page-locked memory
    if flag.is_cuda:
        copied = torch.cuda.Event()
        copied.record()
    return HostCopy(host, copied)


class UndecidedSteps:
    """Steps that may have overflowed: the host learns of it a step later, and waits for none."""

    def __init__(self) -> None:
        self._asked: list[HostCopy] = []
        self._issued: list[tuple[HostCopy, bool, bool]] = []

    def ask(self, flag: Tensor) -> None:
        """Start to copy the flag of the step that is being issued."""
        self._asked.append(copy_to_host(flag))

    def issued(self, *, factors: bool, second_order: bool) -> None:
        """The step has been issued, with these updates."""
        self._issued += [(each, factors, second_order) for each in self._asked]
        self._asked.clear()

    def overflows_now(self) -> bool:
        """Whether the step that is being issued has overflowed; waits for the device."""
        return bool(self._asked) and self._asked[-1].read()

    def lost(self, *, leave: int) -> Iterator[tuple[bool, bool]]:
        """Whether factors and second-order data were due in each step that had no effect.

        All but the newest `leave` are decided, whose answers may not have arrived. All ranks ask at the same
        step, so that their schedules agree.
        """
        while len(self._issued) > leave:
            pending, factors, second_order = self._issued.pop(0)
            if pending.read():
                yield factors, second_order
