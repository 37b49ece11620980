"""Registry of exports: runs in the formats of other tools. A new export is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.exports.chrome import chrome_trace
from harness.exports.layer_costs import layer_costs
from harness.exports.mllog import mllog
from harness.exports.openmetrics import openmetrics
from harness.runs.store import Attempt

Export = Callable[[Sequence[Attempt]], str]
"""From attempts, one per cell, to the text of a file; raises UserError if there is nothing to export."""

EXPORTS: Mapping[str, Export] = {
    "trace": chrome_trace, "layers": layer_costs, "mllog": mllog, "openmetrics": openmetrics,
}  # fmt: skip
