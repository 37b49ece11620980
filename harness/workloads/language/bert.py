"""`bert`: masked words, and on request next sentences (Devlin et al. 2019, section 3.1).

Masks and pairs are a function of seed, epoch and example, those of held-out text of the example alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

from harness.workloads.cards.language import BERT_SPECIALS
from harness.workloads.language import gpt
from harness.workloads.language.corpus import Sequences
from harness.workloads.language.gpt import Batch, Keys, positions_of
from harness.workloads.language.masking import mask
from harness.workloads.language.sentence_pairs import check_documents, draw_pairs
from harness.workloads.models.language import bert
from harness.workloads.models.start_weights import load_start
from harness.workloads.sources.tokenizer import Ids
from harness.workloads.workload import Share

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


class Bert(gpt.Language):
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
        found = gpt.sums(scores.words, targets)
        if scores.sentences is not None:
            own = gpt.sums(scores.sentences, batch[3])
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
