"""Translation of sentences (`multi30k`): the Transformer predicts the next word of a target from its source.

Sentences differ in length, and yet a step is the same in any world: each rank has the lengths of the whole
global batch, pads to its longest sentence, and weights a token's loss by its number of tokens.

Activations of padding enter K-FAC's A factors, as in DP-KFAC's release. Setting them to zero would not remove
them: they would still count in the row of ones for a bias, and in the number of positions. Their gradients
are zero, so that they do not enter the G factors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.errors import DataError
from harness.workloads.models.language import Transformer, translate
from harness.workloads.sources.files import import_extra
from harness.workloads.sources.tokenizer import Ids
from harness.workloads.translation import BEGIN, END, PAD
from harness.workloads.translation.pairs import Pairs, ParallelText, Sentences, read_pairs
from harness.workloads.workload import EpochSampler, Share

TEST_SENTENCES = 64  # of an evaluation batch; its scores are this times tokens times the vocabulary
EXTRA_TOKENS = 50  # of a translation at most, beyond its source's (Vaswani et al. 2017, section 6.1)
_IGNORED = -100  # target of a position that torch's cross entropy ignores


class Batch(NamedTuple):
    """Sentences of one rank, padded to the longest of the whole global batch.

    Attributes:
        source: tokens and END, padded, `[B, S]`.
        inputs: BEGIN and the target's tokens, padded, `[B, T]`.
        targets: the target's tokens and END, then ignored positions, `[B, T]`.
        weight: of a token in the loss: number of ranks, whose gradients are averaged, over the tokens of the
            global batch.
    """

    source: Tensor
    inputs: Tensor
    targets: Tensor
    weight: float


class Translation:
    """Pairs of sentences as one rank sees them."""

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        self._options, self._share = options, share
        self._text: ParallelText = read_pairs(options)
        specials = self._text.vocabulary.specials
        self._padding, self._begin, self._end = specials[PAD], specials[BEGIN], specials[END]
        examples = len(self._text.train.indices)
        self.steps_per_epoch = share.steps_per_epoch(examples)
        if not self.steps_per_epoch:
            raise DataError(
                f"there are {examples} training pairs, fewer than one global batch of "
                f"{share.global_batch_size}; use a longer text or a smaller batch"
            )

    def model(self) -> nn.Module:
        """The Transformer of the options' size."""
        network = Transformer(self._options, self._padding).to(self._share.device)
        if self._options["dropout"]:
            self._share.seed_torch()  # ranks have the same weights, and drop different units
        return network

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Shuffled anew each epoch; the incomplete last batch is dropped."""
        pairs = self._text.train
        sampler = EpochSampler(self._share, len(pairs.indices), epoch, first_step)
        for global_batch, local_batch in zip(sampler.global_batches, sampler, strict=True):
            yield self._batch(pairs, pairs.indices[local_batch.numpy()], pairs.indices[global_batch.numpy()])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """A loss whose mean over ranks is the mean over the global batch's tokens."""
        smoothing = self._options["label_smoothing"]
        return _cross_entropy(model(batch.source, batch.inputs), batch.targets, smoothing) * batch.weight

    def micro_batches(self, batch: Batch, count: int) -> list[Batch]:
        """Equal numbers of pairs; each part's loss is `count` times its share of the sum over all tokens."""
        rows = len(batch.source) // count
        sides = (side.split(rows) for side in (batch.source, batch.inputs, batch.targets))
        return [
            Batch(source, inputs, targets, batch.weight * count)
            for source, inputs, targets in zip(*sides, strict=True)
        ]

    def loss_terms(self, batch: Batch) -> float:
        """The tokens that are no padding: of the global batch, over the ranks."""
        return 1.0 / batch.weight

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        """Correct next tokens and summed loss, not smoothed, over every world_size-th held-out pair."""
        correct, loss, count = 0.0, 0.0, 0
        for indices in self._held_out():
            batch = self._batch(self._text.test, indices, indices)
            scores = model(batch.source, batch.inputs)
            correct += float((scores.argmax(2) == batch.targets).sum())
            loss += float(_cross_entropy(scores, batch.targets))
            count += int((batch.targets != _IGNORED).sum())
        return {"accuracy": correct, "loss": loss}, count

    def _held_out(self) -> Iterator[Ids]:
        """Batches of indices of this rank's held-out pairs, sorted by length."""
        pairs, share = self._text.test, self._share
        own = pairs.indices[share.rank :: share.world_size]
        own = own[np.argsort(pairs.source.lengths[own], kind="stable")]
        for start in range(0, len(own), TEST_SENTENCES):
            yield own[start : start + TEST_SENTENCES]

    def _batch(self, pairs: Pairs, local: Ids, all_ranks: Ids) -> Batch:
        """The pairs with the indices `local`, of a global batch with the indices `all_ranks`."""
        source = self._with_end(pairs.source, local, all_ranks, self._padding)
        targets = self._with_end(pairs.target, local, all_ranks, _IGNORED)
        inputs = np.full_like(targets, self._begin)
        inputs[:, 1:] = pairs.target.padded(local, targets.shape[1] - 1, self._padding)
        tokens = int((pairs.target.lengths[all_ranks] + 1).sum())
        weight = self._share.world_size / tokens
        return Batch(self._on_device(source), self._on_device(inputs), self._on_device(targets), weight)

    def _on_device(self, ids: Ids) -> Tensor:
        return torch.from_numpy(ids).to(self._share.device)

    def _with_end(self, sentences: Sentences, local: Ids, all_ranks: Ids, padding: int) -> Ids:
        rows = sentences.padded(local, int(sentences.lengths[all_ranks].max()) + 1, padding)
        rows[np.arange(len(local)), sentences.lengths[local]] = self._end
        return rows


class TranslationWithBleu(Translation):
    """Also translates the held-out sources, for BLEU.

    Attributes:
        pooled_metrics: BLEU counts matches in the whole held-out text, and is not a mean over its sentences.
    """

    pooled_metrics = ("bleu",)

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        _sacrebleu()  # if it is missing, fail before the first epoch
        super().__init__(options, share)
        self._translations: dict[int, str] = {}

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        """As above; also translates this rank's sources, which `findings` returns."""
        assert isinstance(model, Transformer)  # noqa: S101  the network of `model`
        self._translations = {}
        for indices in self._held_out():
            source = self._batch(self._text.test, indices, indices).source
            maximum = self._on_device(self._text.test.source.lengths[indices] + EXTRA_TOKENS)
            translations = translate(model, source, maximum, self._begin, self._end)
            self._translations |= {
                int(index): self._text.decode(ids) for index, ids in zip(indices, translations, strict=True)
            }
        return super().evaluate(model)

    def findings(self) -> bytes:
        """This rank's translations by index."""
        return json.dumps(self._translations).encode()

    def score(self, findings: Sequence[bytes]) -> Mapping[str, float]:
        """Corpus BLEU of all ranks' translations."""
        by_index = {int(index): text for part in findings for index, text in json.loads(part).items()}
        references = self._text.references()
        indices = sorted(by_index)
        return {
            "bleu": bleu([by_index[index] for index in indices], [references[index] for index in indices])
        }


def build(options: Mapping[str, Any], share: Share) -> Translation:
    """Translation as the rank of `share` sees it."""
    return TranslationWithBleu(options, share) if options["bleu"] else Translation(options, share)


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """Corpus BLEU (Papineni et al. 2002), 0 to 100, with one reference each.

    Computed with sacrebleu's defaults (Post 2018): cased, tokenizer 13a.
    """
    # force: no warning on each rank's output if the text looks tokenized already
    return float(_sacrebleu().BLEU(force=True).corpus_score(list(translations), [list(references)]).score)


def _sacrebleu() -> ModuleType:
    """The optional library's module of BLEU."""
    return import_extra("sacrebleu.metrics.bleu", "workload.options.bleu: true", "language")


def _cross_entropy(scores: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Sum over all targets."""
    return functional.cross_entropy(
        scores.flatten(0, 1),
        targets.flatten(),
        ignore_index=_IGNORED,
        reduction="sum",
        label_smoothing=smoothing,
    )
