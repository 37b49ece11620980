"""The mutants, by package. To add one: an entry in the list that fits, with the tests that should notice."""

from jobs.experiments.mutants.lists import (
    analysis_comparisons,
    analysis_predictions,
    analysis_records,
    analysis_report,
    analysis_statistics,
    harness_launchers,
    harness_runs,
    harness_study,
    harness_training,
)
from jobs.experiments.mutants.lists.kfac_core import KFAC_CORE
from jobs.experiments.mutants.mutant import Package

PACKAGES = (
    KFAC_CORE,
    Package(
        "analysis",
        (
            *analysis_comparisons.MUTANTS,
            *analysis_statistics.MUTANTS,
            *analysis_report.MUTANTS,
            *analysis_records.MUTANTS,
            *analysis_predictions.MUTANTS,
        ),
    ),
    Package(
        "harness",
        (
            *harness_study.MUTANTS,
            *harness_launchers.MUTANTS,
            *harness_runs.MUTANTS,
            *harness_training.MUTANTS,
        ),
    ),
)
