"""Translation of sentences (`multi30k`): the Transformer learns the next word of a target from its source.

Sentences are ragged, and yet a step is the same in any world: each rank knows the lengths of the whole global
batch, pads to its longest sentence, and weighs a token's loss by its number of tokens.

Activations of padding enter K-FAC's A, as in DP-KFAC's release. Setting them to zero would not take them
out: they would still count in the row of ones that stands for a bias, and in the number of positions. Their
gradients are zero, so that G has none of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from harness.errors import DataError
from harness.workloads.cards.translation import BEGIN, END, PAD
from harness.workloads.language.tokens import Ids
from harness.workloads.models.translation import Transformer, translate
from harness.workloads.sources.order import generator_of, global_batches, steps_per_epoch
from harness.workloads.translation.bleu import bleu, scorer
from harness.workloads.translation.pairs import Pairs, ParallelText, read_pairs
from harness.workloads.workload import Share

TEST_SENTENCES = 64  # at once; their scores are this times tokens times the vocabulary
MORE_TOKENS = 50  # than its source's a translation may have (Vaswani et al. 2017, section 6.1)
_NOTHING = -100  # where nothing is asked; torch's cross entropy leaves it out


class Batch(NamedTuple):
    """Sentences of one rank, as long as the longest of the whole global batch.

    Attributes:
        source: tokens and an end mark, padded, `[B, S]`.
        shown: the begin mark and the target's tokens, padded, `[B, T]`.
        wanted: the target's tokens and an end mark, then nothing, `[B, T]`.
        weight: of a token in the loss: ranks, whose gradients are averaged, over tokens of the global batch.
    """

    source: Tensor
    shown: Tensor
    wanted: Tensor
    weight: float


class Translation:
    """Pairs of sentences as one rank sees them."""

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        self._options, self._share = options, share
        self._text: ParallelText = read_pairs(options)
        marks = self._text.vocabulary.specials
        self._padding, self._begin, self._end = marks[PAD], marks[BEGIN], marks[END]
        examples = len(self._text.train.numbers)
        self.steps_per_epoch = steps_per_epoch(share, examples)
        if not self.steps_per_epoch:
            raise DataError(
                f"there are {examples} training pairs, fewer than one global batch of "
                f"{share.global_batch_size}; use a longer text or a smaller batch"
            )

    def model(self) -> nn.Module:
        """The Transformer of the options' size."""
        network = Transformer(self._options, self._padding).to(self._share.device)
        if self._options["dropout"]:
            # Weights are drawn alike on all ranks; what they drop from here on is each one's own.
            torch.manual_seed(self._share.seed * 1_000_003 + self._share.rank)
        return network

    def batches(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Shuffled anew each epoch; the incomplete last batch is left out."""
        pairs = self._text.train
        order = torch.randperm(len(pairs.numbers), generator=generator_of(self._share, epoch))
        for all_gather_rows in global_batches(self._share, order, first_step):
            mine = self._share.slice_of(all_gather_rows)
            yield self._posed(pairs, pairs.numbers[mine.numpy()], pairs.numbers[all_gather_rows.numpy()])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """This rank's part of the mean over the global batch's tokens, times the ranks: their mean is it."""
        smoothing = self._options["label_smoothing"]
        return _cross_entropy(model(batch.source, batch.shown), batch.wanted, smoothing) * batch.weight

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        """Right next tokens and summed loss, without smoothing, over every world_size-th held-out pair."""
        correct, loss, count = 0.0, 0.0, 0
        for numbers in self._held_out():
            batch = self._posed(self._text.test, numbers, numbers)
            scores = model(batch.source, batch.shown)
            correct += float((scores.argmax(2) == batch.wanted).sum())
            loss += float(_cross_entropy(scores, batch.wanted))
            count += int((batch.wanted != _NOTHING).sum())
        return {"accuracy": correct, "loss": loss}, count

    def _held_out(self) -> Iterator[Ids]:
        """Numbers of this rank's held-out pairs, some at a time, those of like length together."""
        pairs, share = self._text.test, self._share
        own = pairs.numbers[share.rank :: share.world_size]
        own = own[np.argsort(pairs.source.lengths[own], kind="stable")]
        for start in range(0, len(own), TEST_SENTENCES):
            yield own[start : start + TEST_SENTENCES]

    def _posed(self, pairs: Pairs, mine: Ids, all_gather_rows: Ids) -> Batch:
        """The pairs of these numbers, as part of a global batch of all those."""
        source = self._ended(pairs, "source", mine, all_gather_rows, self._padding)
        wanted = self._ended(pairs, "target", mine, all_gather_rows, _NOTHING)
        shown = np.full_like(wanted, self._begin)
        shown[:, 1:] = pairs.target.padded(mine, wanted.shape[1] - 1, self._padding)
        tokens = int((pairs.target.lengths[all_gather_rows] + 1).sum())
        weight = self._share.world_size / tokens
        return Batch(self._on_device(source), self._on_device(shown), self._on_device(wanted), weight)

    def _on_device(self, ids: Ids) -> Tensor:
        return torch.from_numpy(ids).to(self._share.device)

    def _ended(self, pairs: Pairs, side: str, mine: Ids, all_gather_rows: Ids, padding: int) -> Ids:
        sentences = getattr(pairs, side)
        rows: Ids = sentences.padded(mine, int(sentences.lengths[all_gather_rows].max()) + 1, padding)
        rows[np.arange(len(mine)), sentences.lengths[mine]] = self._end
        return rows


class Translated(Translation):
    """The same with BLEU, which needs the held-out sources translated.

    Attributes:
        pooled_metrics: BLEU counts matches in the whole held-out text, and is no mean over its sentences.
    """

    pooled_metrics = ("bleu",)

    def __init__(self, options: Mapping[str, Any], share: Share) -> None:
        scorer()  # refuses before the first epoch and not after it
        super().__init__(options, share)
        self._found: dict[int, str] = {}

    def evaluate(self, model: nn.Module) -> tuple[dict[str, float], int]:
        """As above; what this rank's sources are translated to is kept for `findings`."""
        assert isinstance(model, Transformer)  # noqa: S101  it is what `model` gave
        self._found = {}
        for numbers in self._held_out():
            source = self._posed(self._text.test, numbers, numbers).source
            most = self._on_device(self._text.test.source.lengths[numbers] + MORE_TOKENS)
            said = translate(model, source, most, self._begin, self._end)
            self._found |= {
                int(number): self._text.written(ids) for number, ids in zip(numbers, said, strict=True)
            }
        return super().evaluate(model)

    def findings(self) -> bytes:
        """This rank's translations by number."""
        return json.dumps(self._found).encode()

    def score(self, findings: Sequence[bytes]) -> Mapping[str, float]:
        """Corpus BLEU of all ranks' translations."""
        found = {int(number): text for part in findings for number, text in json.loads(part).items()}
        references = self._text.references()
        numbers = sorted(found)
        return {"bleu": bleu([found[number] for number in numbers], [references[n] for n in numbers])}


def build(options: Mapping[str, Any], share: Share) -> Translation:
    """Translation as the rank of `share` sees it."""
    return Translated(options, share) if options["bleu"] else Translation(options, share)


def _cross_entropy(scores: Tensor, wanted: Tensor, smoothing: float = 0.0) -> Tensor:
    """Sum over what is asked."""
    return functional.cross_entropy(
        scores.flatten(0, 1),
        wanted.flatten(),
        ignore_index=_NOTHING,
        reduction="sum",
        label_smoothing=smoothing,
    )
