"""Runs as OpenMetrics text, for Prometheus and compatible tools.

Counters of each rank's work so far, gauges of the present state; labels `sweep`, `cell` and `rank`.
Source: OpenMetrics 1.0, https://prometheus.io/docs/specs/om/open_metrics_spec/.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from harness.runs.record_lines import effective_records
from harness.runs.store import Attempt

Labels = tuple[tuple[str, str], ...]

# name: (type, unit, help); a counter's samples carry the suffix _total
_FAMILIES = {
    "kronscale_phase_seconds": ("counter", "seconds", "Exclusive time of a phase on a rank."),
    "kronscale_sent_bytes": ("counter", "bytes", "Payload that a rank handed to collectives."),
    "kronscale_train_seconds": ("counter", "seconds", "Train clock of a rank."),
    "kronscale_steps": ("counter", "", "Steps of closed windows."),
    "kronscale_samples": ("counter", "", "Examples that a rank processed."),
    "kronscale_energy_joules": ("counter", "joules", "Energy of a rank's GPU over its windows."),
    "kronscale_memory_bytes": ("gauge", "bytes", "Memory at the end of the last window."),
    "kronscale_metric": ("gauge", "", "Newest value of a metric, the target's or another."),
    "kronscale_epoch": ("gauge", "", "Epochs finished at the newest evaluation."),
    "kronscale_segments": ("gauge", "", "Times that the run was started."),
}


_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def openmetrics(attempts: Sequence[Attempt]) -> str:
    """One exposition of all attempts, with `# EOF` at the end."""
    samples: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
    for attempt in attempts:
        cell_labels = {"sweep": attempt.cell_folder.path.parent.name, "cell": attempt.cell_folder.id}
        for rank in range(attempt.cell_folder.cell().world_size):
            for record in effective_records(attempt, rank):
                _add(samples, record, {**cell_labels, "rank": str(rank)})
    lines = []
    for name, (kind, unit, description) in _FAMILIES.items():
        lines += [f"# TYPE {name} {kind}", f"# HELP {name} {description}"]
        if unit:
            lines.append(f"# UNIT {name} {unit}")
        suffix = "_total" if kind == "counter" else ""
        for labels, value in samples[name].items():
            lines.append(f"{name}{suffix}{_format_labels(labels)} {_format_number(value)}")
    return "\n".join([*lines, "# EOF"]) + "\n"


def _add(
    samples: Mapping[str, dict[Labels, float]], record: Mapping[str, Any], labels: dict[str, str]
) -> None:
    own = tuple(labels.items())
    if record["kind"] == "phases":
        for field, name in (("seconds", "phase_seconds"), ("sent_bytes", "sent_bytes")):
            for phase, value in record[field].items():
                samples[f"kronscale_{name}"][*own, ("phase", phase)] += value
        samples["kronscale_train_seconds"][own] += record["wall_seconds"]
        samples["kronscale_steps"][own] += record["steps"]
        samples["kronscale_samples"][own] += record["samples"]
        for kind, value in record["memory_bytes"].items():
            samples["kronscale_memory_bytes"][*own, ("kind", kind)] = value
    elif record["kind"] == "evaluation":
        for metric, value in {record["metric"]: record["value"], **record["metrics"]}.items():
            samples["kronscale_metric"][*own, ("metric", metric)] = value
        samples["kronscale_epoch"][own] = record["epoch"]
    elif record["kind"] == "segment":
        samples["kronscale_segments"][own] = record["segment"] + 1
    elif record["kind"] == "device" and record["energy_joules"] is not None:
        samples["kronscale_energy_joules"][own] += record["energy_joules"]


def _format_labels(labels: Labels) -> str:
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels) + "}"


def _format_number(value: float) -> str:
    return "NaN" if math.isnan(value) else repr(float(value))
