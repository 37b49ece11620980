"""Arms over world sizes: predictions, crossovers, and the fastest arm that fits in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise

from analysis.cost_model.calibration import Calibration
from analysis.cost_model.models import Model
from analysis.cost_model.prediction import Prediction, predict
from analysis.cost_model.work import Setup
from kfac_core.config import STRATEGIES, KFACConfig
from kfac_core.errors import PlacementError
from kfac_core.placement.strategies import check_world_size

SGD = "sgd"
ARMS = (SGD, *STRATEGIES)


@dataclass(frozen=True)
class Question:
    """The settings under which all arms are predicted.

    Attributes:
        config: K-FAC's settings; each arm sets its own strategy.
        grad_worker_fraction: of hybrid_opt; the nearest that divides the world is used.
        memory_bytes: budget of a rank, or None.
        epochs_ratio: epochs that K-FAC needs over those of SGD, or None.
    """

    model: Model
    config: KFACConfig
    local_batch_size: int
    calibration: Calibration
    grad_worker_fraction: float = 0.5
    overlap: bool = False
    memory_bytes: int | None = None
    epochs_ratio: float | None = None

    def setup(self, arm: str, world_size: int) -> Setup:
        """The arm at this world size."""
        config = None
        if arm != SGD:
            fraction = self._fraction(world_size) if arm == "hybrid_opt" else None
            config = replace(self.config, strategy=arm, grad_worker_fraction=fraction)
        return Setup(self.model, config, world_size, self.local_batch_size, overlap=self.overlap)

    def fits(self, prediction: Prediction) -> bool:
        """Whether the rank with most memory stays within the budget."""
        return self.memory_bytes is None or prediction.peak_bytes <= self.memory_bytes

    def to_accuracy(self, arm: str, prediction: Prediction) -> float:
        """Seconds of a step times the epochs needed, in steps of SGD; without a ratio, seconds of a step."""
        factor = 1.0 if arm == SGD or self.epochs_ratio is None else self.epochs_ratio
        return factor * prediction.total.central

    def _fraction(self, world_size: int) -> float:
        workers = min(
            (m for m in range(1, world_size + 1) if world_size % m == 0),
            key=lambda m: abs(m / world_size - self.grad_worker_fraction),
        )
        return workers / world_size


Table = dict[int, dict[str, Prediction]]
"""By world size and arm."""


def ask(question: Question, world_sizes: Sequence[int], arms: Sequence[str] = ARMS) -> Table:
    """Predict every arm at every world size."""
    return {
        size: {arm: predict(question.setup(arm, size), question.calibration) for arm in arms}
        for size in world_sizes
    }


def crossovers(question: Question, table: Table) -> Iterator[tuple[int, int, str]]:
    """(from, to, sentence) for every pair of arms whose order changes between two world sizes."""
    what = "to the target" if question.epochs_ratio is not None else "a step"
    for (before, first), (after, second) in pairwise(sorted(table.items())):
        for one, other in combinations(first, 2):
            gaps = [
                question.to_accuracy(one, arms[one]) - question.to_accuracy(other, arms[other])
                for arms in (first, second)
            ]
            if gaps[0] * gaps[1] < 0:
                winner, loser = (one, other) if gaps[1] < 0 else (other, one)
                yield before, after, f"{winner} is faster {what} than {loser} from {after} ranks on"


@dataclass(frozen=True)
class Recommendation:
    """The fastest arm, and the reasons, a sentence each."""

    setup: Setup
    prediction: Prediction
    reasons: tuple[str, ...]


def recommend(
    question: Question, world_size: int, *, overhead: float = 0.1, choose_intervals: bool = True
) -> Recommendation | None:
    """The K-FAC strategy, fraction and intervals of the fastest step that fits; None if none fits.

    All are compared at the same intervals: the shortest E of the usual ones, F = E / 10, at which the
    fastest step takes at most `overhead` longer than any strategy's without updates. There is no
    theory of the epochs that staleness costs, so longer intervals are not considered.
    """
    fitting: list[tuple[Setup, Prediction]] = []
    too_big: list[str] = []
    for config in candidates(question.config, world_size):
        setup = replace(question.setup(SGD, world_size), config=config)
        prediction = predict(setup, question.calibration)
        if question.fits(prediction):
            fitting.append((setup, prediction))
        else:
            too_big.append(described(config))
    if not fitting:
        return None
    if choose_intervals:
        interval = _interval([_Events.of(prediction) for _, prediction in fitting], overhead)
        chosen = [_every(setup, interval) for setup, _ in fitting]
        fitting = [(setup, predict(setup, question.calibration)) for setup in chosen]
    found = sorted(
        ((prediction.total.central, setup, prediction) for setup, prediction in fitting),
        key=lambda candidate: candidate[0],
    )
    _, setup, best = found[0]
    intervals = _why_intervals(setup, best, overhead if choose_intervals else None)
    return Recommendation(setup, best, tuple(_reasons(question, found, too_big, world_size, intervals)))


def described(config: KFACConfig | None) -> str:
    """A strategy with its fraction."""
    if config is None:
        return SGD
    fraction = config.grad_worker_fraction
    return config.strategy if fraction is None else f"{config.strategy} at fraction {fraction:g}"


def candidates(config: KFACConfig, world_size: int) -> Iterator[KFACConfig]:
    """`config` with each strategy that the world allows, hybrid_opt with each number of gradient workers."""
    for strategy in STRATEGIES:
        workers = (m for m in range(2, world_size) if world_size % m == 0)  # gradient workers of a layer
        fractions = [m / world_size for m in workers] if strategy == "hybrid_opt" else [None]
        for fraction in fractions:
            try:
                candidate = replace(config, strategy=strategy, grad_worker_fraction=fraction)
                check_world_size(candidate, world_size)
            except PlacementError:
                continue
            yield candidate


_USUAL_INTERVALS = (10, 20, 50, 100, 200, 500, 1000, 2000)  # of the papers' runs


@dataclass(frozen=True)
class _Events:
    """Seconds of an arm's events; they do not depend on its intervals, so one prediction is enough.

    Attributes:
        factor: of one factor update.
        inverse: of one inverse update.
        base: of a step without updates.
    """

    factor: float
    inverse: float
    base: float

    @classmethod
    def of(cls, prediction: Prediction) -> _Events:
        sums = {"factor": 0.0, "inverse": 0.0, "base": 0.0}
        for phase, seconds in prediction.event_seconds.items():
            kind = phase.value.partition("_")[0]
            sums[kind if kind in sums else "base"] += seconds.central
        return cls(**sums)

    def updates(self, interval: int) -> float:
        """Seconds of updates in a mean step, with an inverse update every `interval` steps."""
        return self.factor / _factor_interval(interval) + self.inverse / interval


def _factor_interval(interval: int) -> int:
    return max(1, interval // 10)


def _interval(arms: Sequence[_Events], overhead: float) -> int:
    """The shortest usual interval at which an arm is within `overhead` of the fastest step without updates.

    The reference is not the arm's own step: a slow step would make frequent updates look cheap. If no
    interval is long enough, the longest.
    """
    limit = (1 + overhead) * min(arm.base for arm in arms)
    fast = (e for e in _USUAL_INTERVALS if min(arm.base + arm.updates(e) for arm in arms) <= limit)
    return next(fast, _USUAL_INTERVALS[-1])


def _every(setup: Setup, interval: int) -> Setup:
    """The same arm with an inverse update every `interval` steps."""
    assert setup.config is not None  # noqa: S101  candidates have one
    config = replace(
        setup.config, factor_update_steps=_factor_interval(interval), inverse_update_steps=interval
    )
    return replace(setup, config=config)


def _why_intervals(setup: Setup, prediction: Prediction, overhead: float | None) -> str:
    intervals = f"F = {setup.factor_update_steps}, E = {setup.inverse_update_steps}"
    if overhead is None:
        return f"{intervals}: as given"
    step = {phase.value: seconds.central for phase, seconds in prediction.step_seconds.items()}
    updates = sum(seconds for phase, seconds in step.items() if phase.startswith(("factor", "inverse")))
    share = updates / (sum(step.values()) - updates)
    if share <= overhead * (1 + 1e-9):
        return f"{intervals}: the shortest usual ones with updates at most {overhead:.0%} of the rest"
    return f"{intervals}: the longest usual ones, and updates still cost {share:.0%} of the rest"


def _reasons(
    question: Question,
    found: list[tuple[float, Setup, Prediction]],
    too_big: list[str],
    world_size: int,
    intervals: str,
) -> Iterator[str]:
    seconds, _, best = found[0]
    low, high = best.total.low, best.total.high
    yield f"{seconds:.3g} s a step ({low:.3g} to {high:.3g}), most of it {best.largest_phase}"
    if len(found) > 1:
        other, second, rival = found[1]
        sure = "for certain" if rival.total.low > high else "not for certain: the intervals overlap"
        slower = f"{other / seconds - 1:.1%} slower at the same intervals"
        yield f"next is {described(second.config)}, {slower}, {sure}"
    yield intervals
    if too_big:
        listed = ", ".join(too_big[:4]) + (" and others" if len(too_big) > 4 else "")
        yield f"does not fit in {(question.memory_bytes or 0) / 2**30:g} GiB: {listed}"
    sgd = predict(question.setup(SGD, world_size), question.calibration)
    if question.epochs_ratio is not None:
        ratio = question.to_accuracy("", best) / sgd.total.central
        result = "K-FAC wins" if ratio < 1 else "SGD wins"
        yield f"at {question.epochs_ratio:g} of SGD's epochs it takes {ratio:.2f} of SGD's time: {result}"
    else:
        even = sgd.total.central / seconds
        yield f"it pays off if K-FAC needs less than {even:.2f} of SGD's epochs"
