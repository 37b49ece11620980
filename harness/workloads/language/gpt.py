"""Language models: a text as one rank sees it; and `gpt`, which predicts the next word.

All sequences have equal length. None is padded, and all have the same number of predictions, so that a mean
over predictions is a mean over sequences, and over ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.errors import DataError
from harness.workloads.cards.language import GPT_SPECIALS
from harness.workloads.language import corpus
from harness.workloads.models.language import gpt2
from harness.workloads.sources.sampling import epoch_generator, local_batches, seed_this_rank, steps_per_epoch
from harness.workloads.sources.tokenizer import Ids
from harness.workloads.workload import Share

TEST_TOKENS = 8192  # of an evaluation batch; it has at most as many scores for each word of the vocabulary
_HELD_OUT = 1 << 32  # instead of the seed in the keys of held-out sequences; no seed is as large

Batch = tuple[Tensor, ...]
Keys = Sequence[tuple[int, ...]]


class Language(ABC):
    """A text as one rank sees it."""

    def __init__(
        self,
        options: Mapping[str, Any],
        share: Share,
        *,
        specials: tuple[str, ...],
        length: int,
        stride: int,
    ) -> None:
        self._options, self._share = options, share
        self._corpus = corpus.read_corpus(options, specials, length, stride)
        self.steps_per_epoch = steps_per_epoch(share, self._corpus.train.count)
        if not self.steps_per_epoch:
            raise DataError(
                f"the training text has {self._corpus.train.count} sequences, fewer than one global batch "
                f"of {share.global_batch_size}; use a longer text or a smaller batch"
            )

    def model(self) -> nn.Module:
        """The network of the options' size."""
        network = self._network().to(self._share.device)
        if self._options["dropout"]:
            seed_this_rank(self._share)  # ranks have the same weights, and drop different units
        return network

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Shuffled (and masked) anew each epoch; the incomplete last batch is dropped."""
        order = torch.randperm(self._corpus.train.count, generator=epoch_generator(self._share, epoch))
        for batch in local_batches(self._share, order, first_step):
            indices = batch.numpy()
            keys = [(self._share.seed, epoch, int(index)) for index in indices]
            yield self._on_device(self._inputs_and_targets(self._corpus.train, indices, keys))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy over the predictions."""
        return functional.cross_entropy(self.scores(model, batch).flatten(0, 1), batch[-1].flatten())

    def loss_terms(self, batch: Batch) -> float:
        """The predictions."""
        return batch[-1].numel()

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        """Correct predictions and summed loss over every world_size-th held-out sequence."""
        test, share = self._corpus.test, self._share
        own = np.arange(share.rank, test.count, share.world_size)
        size = max(1, TEST_TOKENS // test.length)
        totals, count = dict[str, float](), 0
        for start in range(0, len(own), size):
            indices = own[start : start + size]
            keys = [(_HELD_OUT, int(index)) for index in indices]
            batch = self._on_device(self._inputs_and_targets(test, indices, keys))
            for metric, total in self._sums(model, batch).items():
                totals[metric] = totals.get(metric, 0.0) + total
            count += batch[-1].numel()
        return totals or dict.fromkeys(self._metrics, 0.0), count

    @property
    def _metrics(self) -> tuple[str, ...]:
        return "accuracy", "loss"

    def _sums(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        """Sums of the metrics over the predictions of a batch."""
        return sums(self.scores(model, batch), batch[-1])

    @abstractmethod
    def _network(self) -> nn.Module: ...

    @abstractmethod
    def _inputs_and_targets(self, text: corpus.Sequences, indices: Ids, keys: Keys) -> tuple[Ids, ...]:
        """A batch of sequences as inputs of the model and, last, the targets `[B, k]`."""

    @abstractmethod
    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Scores of the vocabulary for each prediction, `[B, k, vocabulary]`."""

    def _on_device(self, columns: tuple[Ids, ...]) -> Batch:
        return tuple(torch.from_numpy(column).to(self._share.device) for column in columns)


class Gpt(Language):
    """Next tokens of `sequence_length`; the last target of a sequence is the first input of the next one."""

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        length = options["sequence_length"]
        super().__init__(options, share, specials=GPT_SPECIALS, length=length + 1, stride=length)

    def _network(self) -> nn.Module:
        return gpt2(self._options)

    def _inputs_and_targets(self, text: corpus.Sequences, indices: Ids, keys: Keys) -> tuple[Ids, ...]:
        rows = text.rows(indices)
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Scores of the vocabulary for each token, `[B, k, vocabulary]`."""
        inputs, _ = batch
        scores: Tensor = model(input_ids=inputs, position_ids=positions_of(inputs), use_cache=False).logits
        return scores


def sums(scores: Tensor, targets: Tensor) -> dict[str, float]:
    """Correct predictions and summed loss, of scores `[B, k, classes]` or `[B, classes]`."""
    rows, wanted = scores.reshape(-1, scores.shape[-1]), targets.flatten()
    return {
        "accuracy": float((rows.argmax(1) == wanted).sum()),
        "loss": float(functional.cross_entropy(rows, wanted, reduction="sum")),
    }


def positions_of(inputs: Tensor) -> Tensor:
    """Each token's position, for each example, so that K-FAC sees a gradient of every token."""
    return torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
