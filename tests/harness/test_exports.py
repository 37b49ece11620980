"""Promise: the tools that an export is for can read it, and find the values of the records."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from chrometrace import TraceEvent, TraceEventType
from mlperf_logging.compliance_checker.mlp_parser import parse_file
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from harness.cell import Cell
from harness.cli import main
from harness.exports import EXPORTS
from harness.runs.attempt_outcome import Outcome
from harness.runs.record_lines import RecordWriter  # fmt: skip
from harness.runs.records import DeviceRecord, EvalRecord, PhaseRecord, SegmentRecord, TraceRecord
from harness.runs.store import Attempt, sweep_folder

BEGAN = 1_700_000_000.25
CELL = Cell.model_validate({
    "sweep": "study", "method": 'm', "workload": "digits", "world_size": 2, "seed": 5,
    "target": {"metric": "accuracy", "at_least": 0.9}, "optimizer": {"lr": 0.1},
    "training": {"global_batch_size": 256, "epochs": 4},
})  # fmt: skip


def evaluation(step: int, value: float, segment: int = 0) -> EvalRecord:
    wall = 0.5 * step
    clocks = 0.4 * step, 0.1, wall
    return EvalRecord(
        0, step, step / 5, 256 * step, *clocks, "accuracy", value, "higher", 0.5, 0.1, 0.0, segment
    )


def window(rank: int, first: int, segment: int = 0) -> PhaseRecord:
    seconds = {"forward": 1.5 + rank, "gradient_comm": 0.25}
    sent = {"gradient_comm": 1000}
    return PhaseRecord(rank, first, 5, 640, 2.0, seconds, {"forward": 5}, sent, {"rss": 7 + first}, segment)


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    """Two ranks; saved before step 10, killed after 15, resumed; done at 20."""
    made = sweep_folder("study", tmp_path).stage(CELL).new_attempt()
    for rank in range(2):
        spans = (
            (6, "forward", 0.0, 0.125, ""), (6, "backward", 0.125, 0.25, ""), (7, "forward", 0.5, 0.125, ""),
            (7, "precondition", 0.625, 0.25, "conv"), (8, "precondition", 0.875, 0.5, "conv"),
            (8, "precondition", 1.375, 0.5, "fc"),
        )  # fmt: skip
        with RecordWriter(made.records(rank)) as writer:
            records = [
                SegmentRecord(rank, 0, 0, None, BEGAN, 0.0, bitwise=True),
                window(rank, 0), TraceRecord(rank, 0, "host", BEGAN + rank, spans), window(rank, 5),
                window(rank, 10),
                *([evaluation(5, 0.5), evaluation(10, 0.75), evaluation(15, 0.8)] if rank == 0 else []),
                SegmentRecord(rank, 1, 10, 1, BEGAN + 900, 890.0, bitwise=True),
                window(rank, 10, 1), window(rank, 15, 1),
                DeviceRecord(rank, 1, 15, 5, "", energy_joules=40.0),
                *([evaluation(15, 0.8, 1), evaluation(20, 0.95, 1)] if rank == 0 else []),
            ]  # fmt: skip
            for record in records:
                writer.write(record)
    made.write_outcome(Outcome("COMPLETED", "", True, "target", BEGAN, BEGAN + 910))
    return made


def test_a_chrome_trace_has_every_span_of_every_rank_on_one_timeline(attempt):
    events = [TraceEvent.from_dict(raw) for raw in json.loads(EXPORTS["trace"]([attempt]))["traceEvents"]]
    complete = [event for event in events if event.event_type == TraceEventType.COMPLETE]
    spans = [("forward", 6), ("backward", 6), ("forward", 7)]
    spans += [("precondition", 7), ("precondition", 8), ("precondition", 8)]
    assert [(event.process_id, event.name, event.args["step"]) for event in complete] == [
        (rank, *span) for rank in range(2) for span in spans
    ]
    assert [event.args["layer"] for event in complete[3:6]] == ["conv", "conv", "fc"]
    starts = [event.timestamp_us for event in complete]
    assert starts[0] == BEGAN * 1e6
    assert starts[6] - starts[0] == 1e6
    assert [event.duration_us for event in complete[:3]] == [125_000, 250_000, 125_000]
    names = [event.args["name"] for event in events if event.name == "process_name"]
    assert names == [f"{CELL.id} rank 0", f"{CELL.id} rank 1"]


def test_layer_costs_have_a_row_per_layer_over_the_steps_that_have_it(attempt):
    rows = list(csv.DictReader(EXPORTS["layers"]([attempt]).splitlines()))
    values = [(row["rank"], row["phase"], row["layer"], row["steps"], row["seconds_a_step"]) for row in rows]
    assert values == [
        (rank, "precondition", *rest)
        for rank in "01"
        for rest in (("conv", "2", "0.375"), ("fc", "1", "0.5"))
    ]
    assert {row["cell"] for row in rows} == {CELL.id}


def test_mlperfs_parser_reads_the_run_without_the_time_in_the_queue(attempt, tmp_path):
    file = tmp_path / "run.log"
    file.write_text(EXPORTS["mllog"]([attempt]))
    lines, errors = parse_file(str(file), "6.0.0")
    assert errors == []
    by_key: dict[str, list] = {}
    for line in lines:
        by_key.setdefault(line.key, []).append(line)
    assert by_key["seed"][0].value["value"] == 5
    assert by_key["global_batch_size"][0].value["value"] == 256
    scores = [(line.value["value"], line.value["metadata"]["epoch_num"]) for line in by_key["eval_accuracy"]]
    assert scores == [(0.5, 1.0), (0.75, 2.0), (0.8, 3.0), (0.95, 4.0)]
    (start,), (stop,) = by_key["run_start"], by_key["run_stop"]
    assert stop.value["metadata"]["status"] == "success"
    assert stop.timestamp - start.timestamp == 10_000  # ms: 20 steps of half a second, not the 890 s away
    times = [line.timestamp for line in lines]
    assert times == sorted(times)
    (attempt.path / "outcome.json").unlink()
    attempt.write_outcome(Outcome("COMPLETED", "missed", False, "epochs", BEGAN, BEGAN + 1))
    file.write_text(EXPORTS["mllog"]([attempt]))
    assert parse_file(str(file), "6.0.0")[0][-1].value["metadata"]["status"] == "aborted"


def test_prometheus_parser_reads_every_sample_and_repeated_steps_count_once(attempt):
    families = {
        family.name: family for family in text_string_to_metric_families(EXPORTS["openmetrics"]([attempt]))
    }
    phases = {
        (sample.labels["rank"], sample.labels["phase"]): sample.value
        for sample in families["kronscale_phase_seconds"].samples
    }
    assert phases["0", "forward"] == 4 * 1.5
    assert phases["1", "forward"] == 4 * 2.5
    assert {sample.value for sample in families["kronscale_steps"].samples} == {20.0}
    assert {sample.value for sample in families["kronscale_energy_joules"].samples} == {40.0}
    (metric,) = families["kronscale_metric"].samples
    assert (metric.value, metric.labels["cell"], metric.labels["metric"]) == (0.95, CELL.id, "accuracy")
    assert {sample.value for sample in families["kronscale_segments"].samples} == {2.0}
    assert {sample.value for sample in families["kronscale_memory_bytes"].samples} == {22.0}
    assert families["kronscale_phase_seconds"].unit == "seconds"


def test_the_verbs_write_files_and_reject_an_unknown_format(attempt, tmp_path, capsys):
    out = tmp_path / "out" / "trace.json"
    assert main(["export", "trace", "study", "--runs", str(tmp_path), "--out", str(out)]) == 0
    assert json.loads(out.read_text())["traceEvents"]
    assert main(["export", "openmetrics", "study", "--runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.endswith("# EOF\n")
    assert main(["export", "mlog", "study", "--runs", str(tmp_path)]) == 2
    assert "mllog" in capsys.readouterr().err
    attempt.cell_folder.new_attempt()
    assert main(["export", "trace", "study", "--runs", str(tmp_path)]) == 2
    assert "traced_steps: [20, 30]" in capsys.readouterr().err
