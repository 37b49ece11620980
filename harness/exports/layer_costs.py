"""Seconds of every layer in the traced steps, as CSV: a row per run, rank, phase and layer."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Sequence

from harness.errors import UserError
from harness.runs.record_lines import effective_records
from harness.runs.store import Attempt

COLUMNS = ("cell", "rank", "phase", "layer", "steps", "seconds", "seconds_a_step")


def layer_costs(attempts: Sequence[Attempt]) -> str:
    """Seconds by layer over the `steps` traced steps with work for it.

    Raises:
        UserError: no step was traced.
    """
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerow(COLUMNS)
    for attempt in attempts:
        for rank in range(attempt.cell_folder.cell().world_size):
            seconds: dict[tuple[str, str], float] = defaultdict(float)
            steps: dict[tuple[str, str], set[int]] = defaultdict(set)
            for record in effective_records(attempt, rank):
                for step, phase, _, took, *layer in record["spans"] if record["kind"] == "trace" else ():
                    if layer and layer[0]:
                        seconds[phase, layer[0]] += took
                        steps[phase, layer[0]].add(step)
            for key, total in seconds.items():
                count = len(steps[key])
                row = (attempt.cell_folder.id, rank, *key, count, f"{total:.9g}", f"{total / count:.9g}")
                writer.writerow(row)
    if written.getvalue().count("\n") == 1:
        raise UserError(
            "no layer of these runs was traced; set traced_steps: [20, 30] in the site's profile to "
            "trace those steps of every run with K-FAC on that site"
        )
    return written.getvalue()
