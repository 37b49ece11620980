"""Whether an attempt that has ended matches the checksums that its ranks and its launcher wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.errors import StoredFileError
from harness.runs.attempt_outcome import Outcome
from harness.runs.record_lines import read_content
from harness.runs.records import SEALED_SINCE
from harness.runs.seals import SEALED_FILES, check_small_file
from harness.runs.store import Attempt


def damage(attempt: Attempt, cell: Mapping[str, Any]) -> str | None:
    """How an ended attempt differs from its own checksums; None if it does not.

    Args:
        attempt: with an outcome.
        cell: content of `cell.json`.
    """
    try:
        outcome = attempt.outcome()
        if outcome is None:
            return f"{attempt.path / 'outcome.json'} is missing"
        for name in SEALED_FILES:
            content = cell if name == "cell.json" else attempt.read(name)
            check_small_file(attempt.path, name, content, outcome.seals)
        for path in sorted(attempt.path.glob("rank-*.jsonl")):
            _, sealed = read_content(path)
            if not sealed and _must_be_sealed(outcome):
                return f"{path} has no seal at its end: it was cut"
    except (StoredFileError, OSError) as error:
        return str(error)
    return None


def _must_be_sealed(outcome: Outcome) -> bool:
    return outcome.schema >= SEALED_SINCE and outcome.state == "COMPLETED"
