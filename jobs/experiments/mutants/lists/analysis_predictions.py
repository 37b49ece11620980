"""Mutants of predictions: bounds, laws, links, and the choice of an arm."""

from __future__ import annotations

from jobs.experiments.mutants.mutant import Mutant

STUDY = ("tests/analysis/test_study_prediction.py",)
CHOICE = ("tests/analysis/test_study_choice.py",)

MUTANTS = (
    Mutant("bounds of 80 % for 90 %", "study_prediction/bounds.py", "stats.t.ppf((1 + LEVEL) / 2, freedom)",
           "stats.t.ppf(LEVEL, freedom)", STUDY),
    Mutant("bounds of the mean for those of a run", "study_prediction/bounds.py",
           "own.spread * math.sqrt(1 + 1 / len(runs))", "own.spread * math.sqrt(1 / len(runs))", STUDY),
    Mutant("bounds do not widen", "study_prediction/bounds.py", "max(doublings, 1.0)", "1.0", STUDY),
    Mutant("bounds the wrong way round", "study_prediction/bounds.py",
           "central * math.exp(-low), central, central * math.exp(high)",
           "central * math.exp(low), central, central * math.exp(-high)", STUDY),
    Mutant("bounds narrower than the repeatability", "study_prediction/bounds.py",
           "            max(least, _half_width(", "            min(least, _half_width(", STUDY),
    Mutant("no error to start from", "study_prediction/bounds.py",
           "total = PRIOR_COUNT * PRIOR_ERROR**2 + sum(", "total = sum(", STUDY),
    Mutant("the spread of windows hides that of runs", "study_prediction/bounds.py",
           "Repeatability(max(least, math.sqrt(squares / freedom))",
           "Repeatability(min(least, math.sqrt(squares / freedom))", STUDY),
    Mutant("held-out worlds are fitted", "study_prediction/prediction.py",
           "others = [size for size in sizes if size != left]", "others = list(sizes)", STUDY),
    Mutant("a measured world is predicted", "study_prediction/prediction.py",
           "if world_size in arm.worlds and is_own and not stretch:", "if False:", STUDY),
    Mutant("ranks wait less for more of them", "study_prediction/fitted.py",
           "latest(world_size) / latest(known)", "latest(known) / latest(world_size)", STUDY),
    Mutant("the least busy rank decides", "study_prediction/fitted.py",
           "max(seconds) if phase in PER_RANK else", "min(seconds) if phase in PER_RANK else", STUDY),
    Mutant("the fastest rank is waited for", "study_prediction/fitted.py", "max(map(law.at, distinct))",
           "min(map(law.at, distinct))", STUDY),
    Mutant("laws from one term", "study_prediction/laws.py", "    if a >= 0 and b >= 0:\n", "    if False:\n",
           STUDY),
    Mutant("the probability of being slower", "study_prediction/choice.py",
           "math.log(other.central / one.central)", "math.log(one.central / other.central)", CHOICE),
    Mutant("the slowest arm is recommended", "study_prediction/choice.py",
           "ordered = sorted(compared, key=lambda one: choice.seconds(one).central)",
           "ordered = sorted(compared, key=lambda one: -choice.seconds(one).central)", CHOICE),
    Mutant("steps are compared though epochs are known", "study_prediction/choice.py",
           "compared = known or found", "compared = found or known", CHOICE),
    Mutant("the next arm's ratio upside down", "study_prediction/strategy_map.py",
           "other.central / seconds.central", "seconds.central / other.central", CHOICE),
    Mutant("arms that overlap do not", "study_prediction/strategy_map.py", "other.low <= seconds.high",
           "other.low > seconds.high", CHOICE),
    Mutant("faster links are slower", "study_prediction/links.py", "(message, per_byte / speed)",
           "(message, per_byte * speed)", CHOICE),
    Mutant("crowded runs are predicted from", "study_prediction/reading.py",
           'usable &= ~cells["oversubscribed"]', "usable &= usable", STUDY),
    Mutant("epochs of runs that missed", "study_prediction/reading.py", '["scored_epochs"].median()',
           '["epochs"].median()', CHOICE),
    Mutant("the farthest world's epochs", "study_prediction/measured.py",
           "key=lambda size: (abs(math.log2(size / world_size)), size)",
           "key=lambda size: (-abs(math.log2(size / world_size)), size)", CHOICE),
)  # fmt: skip
