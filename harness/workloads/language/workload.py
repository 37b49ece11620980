"""Language models: `bert` fills in masked words, `gpt` says the next one, of texts cut into equal sequences.

No sequence is padded, and each has as many predictions as any other, so that a mean over predictions is a
mean over sequences, and over ranks. The order is that of `harness.workloads.sources.order`; what BERT has to guess is
a matter of seed, epoch and example, and for held-out text of the example alone.
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
from harness.workloads.cards.language import BERT_SPECIALS, GPT_SPECIALS
from harness.workloads.language.corpus import read_corpus
from harness.workloads.language.masking import Ids, mask
from harness.workloads.models.language import bert, gpt2
from harness.workloads.sources.order import generator_of, local_batches, steps_per_epoch
from harness.workloads.workload import Share

TEST_TOKENS = 8192  # of one evaluation batch; its scores are this times the vocabulary at most
_HELD_OUT = 1 << 32  # first of an evaluation's key: beyond every seed's epochs

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
        self._corpus = read_corpus(options, specials, length, stride)
        self.steps_per_epoch = steps_per_epoch(share, self._corpus.train.count)
        if not self.steps_per_epoch:
            raise DataError(
                f"the training text makes {self._corpus.train.count} sequences, fewer than one global batch "
                f"of {share.global_batch_size}; use a longer text or a smaller batch"
            )

    def model(self) -> nn.Module:
        """The network of the options' size."""
        network = self._network().to(self._share.device)
        if self._options["dropout"]:
            # Weights are drawn alike on all ranks; what they drop from here on is each one's own.
            torch.manual_seed(self._share.seed * 1_000_003 + self._share.rank)
        return network

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Shuffled (and masked) anew each epoch; the incomplete last batch is left out."""
        order = torch.randperm(self._corpus.train.count, generator=generator_of(self._share, epoch))
        for mine in local_batches(self._share, order, first_step):
            numbers = mine.numpy()
            keys = [(self._share.seed, epoch, int(number)) for number in numbers]
            yield self._on_device(self._posed(self._corpus.train.rows(numbers), keys))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy over what is to be predicted."""
        return functional.cross_entropy(self._scores(model, batch).flatten(0, 1), batch[-1].flatten())

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        """Right predictions and summed loss over every world_size-th held-out sequence."""
        test, share = self._corpus.test, self._share
        own = np.arange(share.rank, test.count, share.world_size)
        at_once = max(1, TEST_TOKENS // test.length)
        correct, loss, count = 0.0, 0.0, 0
        for start in range(0, len(own), at_once):
            numbers = own[start : start + at_once]
            keys = [(_HELD_OUT, int(number)) for number in numbers]
            batch = self._on_device(self._posed(test.rows(numbers), keys))
            scores, wanted = self._scores(model, batch).flatten(0, 1), batch[-1].flatten()
            correct += float((scores.argmax(1) == wanted).sum())
            loss += float(functional.cross_entropy(scores, wanted, reduction="sum"))
            count += len(wanted)
        return {"accuracy": correct, "loss": loss}, count

    @abstractmethod
    def _network(self) -> nn.Module: ...

    @abstractmethod
    def _posed(self, rows: Ids, keys: Keys) -> tuple[Ids, ...]:
        """A batch of sequences as questions and, last, their answers `[B, k]`."""

    @abstractmethod
    def _scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Scores of the whole vocabulary for each answer, `[B, k, vocabulary]`."""

    def _on_device(self, columns: tuple[Ids, ...]) -> Batch:
        return tuple(torch.from_numpy(column).to(self._share.device) for column in columns)


class Bert(Language):
    """Masked words: `[CLS]`, `sequence_length - 2` tokens, `[SEP]`, 15 % of the tokens to be predicted."""

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        inside = options["sequence_length"] - 2
        super().__init__(options, share, specials=BERT_SPECIALS, length=inside, stride=inside)

    def _network(self) -> nn.Module:
        return bert(self._options)

    def _posed(self, rows: Ids, keys: Keys) -> tuple[Ids, ...]:
        vocabulary = self._corpus.vocabulary
        ends = vocabulary.specials
        masked = mask(rows, keys, ends["[MASK]"], vocabulary.ordinary)
        shown = np.pad(masked.shown, ((0, 0), (1, 1)))
        shown[:, 0], shown[:, -1] = ends["[CLS]"], ends["[SEP]"]
        return shown, masked.places + 1, masked.wanted

    def _scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """The head sees the masked places alone: of all of them it would make 7 times as many scores."""
        shown, places, _ = batch
        body, head = model.get_submodule("bert"), model.get_submodule("cls")
        hidden: Tensor = body(input_ids=shown, position_ids=_positions(shown)).last_hidden_state
        picked = hidden.gather(1, places.unsqueeze(2).expand(-1, -1, hidden.shape[2]))
        scores: Tensor = head(picked)
        return scores


class Gpt(Language):
    """The next token of `sequence_length` ones; the last of a sequence is the first of the following one."""

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        length = options["sequence_length"]
        super().__init__(options, share, specials=GPT_SPECIALS, length=length + 1, stride=length)

    def _network(self) -> nn.Module:
        return gpt2(self._options)

    def _posed(self, rows: Ids, keys: Keys) -> tuple[Ids, ...]:
        return np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])

    def _scores(self, model: nn.Module, batch: Batch) -> Tensor:
        shown, _ = batch
        scores: Tensor = model(input_ids=shown, position_ids=_positions(shown), use_cache=False).logits
        return scores


def build_bert(options: Mapping[str, Any], share: Share) -> Bert:
    """Masked words as the rank of `share` sees them."""
    return Bert(options, share)


def build_gpt(options: Mapping[str, Any], share: Share) -> Gpt:
    """Next words as the rank of `share` sees them."""
    return Gpt(options, share)


def _positions(shown: Tensor) -> Tensor:
    """Each token's position, for each example: K-FAC on position embeddings counts examples by it."""
    return torch.arange(shown.shape[1], device=shown.device).expand_as(shown)
