"""`gpt` predicts the next word; `bert` masked words, and on request next sentences (Devlin et al. 2019, 3.1).

All sequences have equal length. None is padded, and all have the same number of predictions, so that a mean
over predictions is a mean over sequences, and over ranks. BERT's masks and pairs are a function of seed,
epoch and example, those of held-out text of the example alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.errors import DataError
from harness.workloads.language import BERT_SPECIALS, GPT_SPECIALS, corpus
from harness.workloads.language.corpus import Sequences
from harness.workloads.language.masking import check_documents, draw_pairs, mask
from harness.workloads.models.language import bert, gpt2
from harness.workloads.models.weights import load_start
from harness.workloads.sources.tokenizer import Ids
from harness.workloads.workload import EpochSampler, Share, classified

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
        self.steps_per_epoch = share.steps_per_epoch(self._corpus.train.count)
        if not self.steps_per_epoch:
            raise DataError(
                f"the training text has {self._corpus.train.count} sequences, fewer than one global batch "
                f"of {share.global_batch_size}; use a longer text or a smaller batch"
            )

    def model(self) -> nn.Module:
        """The network of the options' size."""
        network = self._network().to(self._share.device)
        if self._options["dropout"]:
            self._share.seed_torch()  # ranks have the same weights, and drop different units
        return network

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Shuffled (and masked) anew each epoch; the incomplete last batch is dropped."""
        for batch in EpochSampler(self._share, self._corpus.train.count, epoch, first_step):
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
        return classified(self.scores(model, batch), batch[-1])

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


def positions_of(inputs: Tensor) -> Tensor:
    """Each token's position, for each example, so that K-FAC sees a gradient of every token."""
    return torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)


NEXT_SENTENCE_LAYERS = ("bert.pooler", "cls.seq_relationship")
"""Modules that the masked words' loss does not reach."""


class Scores(NamedTuple):
    """What the model says of a batch.

    Attributes:
        words: scores of the vocabulary for each masked word, `[B, k, vocabulary]`.
        sentences: scores of "next" and "random" for each sequence, `[B, 2]`; None without that task.
    """

    words: Tensor
    sentences: Tensor | None


class Bert(Language):
    """15 % of the words to be predicted, in sequences of `sequence_length` tokens, special ones included.

    They are `[CLS] words [SEP]`, or with `next_sentence` `[CLS] first [SEP] second [SEP]`, whose segments are
    0 up to the first `[SEP]` and 1 after it. A batch is inputs `[B, T]` and masked places `[B, k]`, with
    `next_sentence` also segments `[B, T]` and whether the second part is random `[B]`, and last the targets
    `[B, k]`.
    """

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        self._pairs = bool(options["next_sentence"])
        inside = options["sequence_length"] - (3 if self._pairs else 2)
        super().__init__(options, share, specials=BERT_SPECIALS, length=inside, stride=inside)
        if self._pairs:
            check_documents(self._corpus.train)
            check_documents(self._corpus.test)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Mean cross entropy over the masked words, plus that over the sequences' second parts."""
        scores = self.all_scores(model, batch)
        loss = functional.cross_entropy(scores.words.flatten(0, 1), batch[-1].flatten())
        if scores.sentences is not None:
            loss = loss + functional.cross_entropy(scores.sentences, batch[3])
        return loss

    def loss_terms_of(self, batch: Batch) -> dict[str, float]:
        """Of the layers that only the next-sentence loss reaches: the sequences."""
        return dict.fromkeys(NEXT_SENTENCE_LAYERS, float(len(batch[0]))) if self._pairs else {}

    def scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Scores of the vocabulary for each masked word, `[B, k, vocabulary]`."""
        return self.all_scores(model, batch).words

    def all_scores(self, model: nn.Module, batch: Batch) -> Scores:
        """The words' head sees the masked places only: for all of them, it would do 7 times the work."""
        inputs, places = batch[0], batch[1]
        body = model.get_submodule("bert")
        given = {"token_type_ids": batch[2]} if self._pairs else {}
        found = body(input_ids=inputs, position_ids=positions_of(inputs), **given)
        hidden: Tensor = found.last_hidden_state
        masked = hidden.gather(1, places.unsqueeze(2).expand(-1, -1, hidden.shape[2]))
        words: Tensor = model.get_submodule("cls.predictions")(masked)
        if not self._pairs:
            return Scores(words, None)
        return Scores(words, model.get_submodule("cls.seq_relationship")(found.pooler_output))

    def _network(self) -> nn.Module:
        model = bert(self._options)
        if self._options["start"]:
            load_start(model, self._options)
        return model

    @property
    def _metrics(self) -> tuple[str, ...]:
        more = ("next_sentence_accuracy", "next_sentence_loss") if self._pairs else ()
        return *super()._metrics, *more

    def _sums(self, model: nn.Module, batch: Batch) -> dict[str, float]:
        """A next sentence counts once for each masked word of its sequence: all sums have one divisor."""
        scores, targets = self.all_scores(model, batch), batch[-1]
        found = classified(scores.words, targets)
        if scores.sentences is not None:
            own = classified(scores.sentences, batch[3])
            found |= {f"next_sentence_{name}": total * targets.shape[1] for name, total in own.items()}
        return found

    def _inputs_and_targets(self, text: Sequences, indices: Ids, keys: Keys) -> tuple[Ids, ...]:
        vocabulary = self._corpus.vocabulary
        pairs = draw_pairs(text, indices, keys) if self._pairs else None
        tokens = pairs.tokens if pairs is not None else text.rows(indices)
        masked = mask(tokens, keys, vocabulary.specials["[MASK]"], vocabulary.ordinary)
        inputs = np.pad(masked.inputs, ((0, 0), (1, 1)))
        inputs[:, 0], inputs[:, -1] = vocabulary.specials["[CLS]"], vocabulary.specials["[SEP]"]
        places = masked.positions + 1
        if pairs is None:
            return inputs, places, masked.targets
        inputs, segments = _divided(inputs, pairs.lengths, vocabulary.specials["[SEP]"])
        places += masked.positions >= pairs.lengths[:, None]
        return inputs, places, segments, pairs.is_random, masked.targets


def _divided(inputs: Ids, lengths: Ids, separator: int) -> tuple[Ids, Ids]:
    """Sequences with a separator after the first `lengths` words, and their segments, `[B, T + 1]`."""
    places = np.arange(inputs.shape[1] + 1)
    segments = (places > lengths[:, None] + 1).astype(np.int64)
    divided = np.take_along_axis(inputs, places - segments, axis=1)
    np.put_along_axis(divided, lengths[:, None] + 1, separator, axis=1)
    return divided, segments
