"""The sums of a recipe, and the patch gram that they make up."""

from __future__ import annotations

import torch
from torch import Tensor

from kfac_core.kernels.convolution.shared_sums import Recipe


class TapSums:
    """Room for every sum of `steps`, to be filled with its products.

    Attributes:
        sums: `[C, C]` by number.
    """

    def __init__(self, steps: Recipe, images: Tensor) -> None:
        channels = images.shape[1]
        self._steps = steps
        self._wanted = images.new_empty(channels, steps.wanted, channels)
        helpers = images.new_empty(len(steps.numbers) - steps.wanted, channels, channels)
        self.sums = [*self._wanted.unbind(1), *helpers]

    def gram(self) -> Tensor:
        """The gram `[n, n]`, from products that are all there; n = C * taps, the channel slowest.

        One selection writes every element once: 0.6 ms for n = 1152, where a copy a block and one more to
        bring the channels outward take 1.5 ms.
        """
        for number, (first, *others) in self._steps.additions:
            total = self.sums[first]
            for other in others:
                total = torch.add(total, self.sums[other], out=self.sums[number])
        for number, transposed in self._steps.mirrors:
            self.sums[number].copy_(self.sums[transposed].mT)
        channels, taps = len(self._wanted), self._steps.taps
        of_taps = torch.tensor(self._steps.of_taps, device=self._wanted.device)
        columns = torch.arange(channels, device=self._wanted.device).view(1, -1, 1)  # [tap, C', tap']
        order = of_taps.view(taps, 1, taps) * channels + columns
        return torch.index_select(self._wanted.flatten(1), 1, order.flatten()).view(channels * taps, -1)
