"""Promise: traced steps show every phase of every rank, in order, and add up to the window's times."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.records import DeviceRecord, PhaseRecord, TraceRecord
from harness.training.measurement.device import DeviceGauge
from harness.training.train import Trainer
from harness.training.world import World
from kfac_core.phases import KFAC_PHASES, Phase
from kfac_core.timing import PhaseTimer
from tests.harness.checkpoint.runs import cell


def traced(rank, world_size, spec, folder, steps):
    records = []
    world = World(rank, world_size, torch.device("cpu"), "gloo")
    Trainer(
        spec, world, HeartbeatWriter(Path(folder) / f"heartbeat-{rank}"), records.append, None, steps
    ).run()
    return records


def test_the_spans_of_a_window_are_its_phases(world, tmp_path):
    spec = cell("comm_opt", 2)
    for records in world(2).run(traced, spec, str(tmp_path), range(10, 15)):
        (trace,) = (record for record in records if isinstance(record, TraceRecord))
        window = next(r for r in records if isinstance(r, PhaseRecord) and r.first_step == 10)
        assert {step for step, *_ in trace.spans} == set(range(10, 15))
        sums: dict[str, float] = {}
        for _, phase, _, seconds, _ in trace.spans:
            sums[phase] = sums.get(phase, 0.0) + seconds
        for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.GRADIENT_COMM, Phase.UPDATE, *KFAC_PHASES):
            assert sums[phase] == pytest.approx(window.seconds[phase], rel=1e-9), phase
        starts = [start for _, _, start, _, _ in trace.spans]
        ends = [start + seconds for _, _, start, seconds, _ in trace.spans]
        assert ends[:-1] == pytest.approx(starts[1:], abs=1e-9)  # no gap, to the clock's rounding
        assert abs(time.time() - trace.started_at) < 600


def test_traced_steps_have_the_layers_of_a_phase_and_they_add_up_to_it(tmp_path):
    records = traced(0, 1, cell("comm_opt", 1), str(tmp_path), range(20))
    traces = [record for record in records if isinstance(record, TraceRecord)]
    all_spans = [span for trace in traces for span in trace.spans]
    names = {"0", "2", "6", "8"}  # modules of the digits net
    for phase in (Phase.FACTOR_COMPUTE, Phase.INVERSE_COMPUTE, Phase.PRECONDITION):
        spans = [(step, layer, seconds) for step, of, _, seconds, layer in all_spans if of == phase]
        assert {layer for _, layer, _ in spans} - {""} == names, phase
        shares = []
        for step in {step for step, _, _ in spans}:
            seconds = [(layer, seconds) for of_step, layer, seconds in spans if of_step == step]
            shares.append(sum(s for layer, s in seconds if not layer) / sum(s for _, s in seconds))
        assert min(shares) < 0.6, phase  # a busy machine may stop some steps between two layers
    assert {layer for _, phase, _, _, layer in all_spans if phase in ("forward", "update")} == {""}


def test_profilers_show_the_phases_only_if_requested():
    for ranges in (True, False):
        timer = PhaseTimer(ranges=ranges)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            timer.start()
            with timer.phase(Phase.FORWARD), timer.phase(Phase.FACTOR_COMPUTE):
                torch.ones(3).sum()
            timer.stop()
        seen = {event.name for event in profile.events()}
        assert ({"kronscale.forward", "kronscale.factor_compute"} <= seen) is ranges


def test_without_a_gpu_there_is_one_device_record_with_nulls_and_a_reason(world, tmp_path):
    (records,) = world(1).run(traced, cell("sgd", 1), str(tmp_path), range(0))
    (record,) = (record for record in records if isinstance(record, DeviceRecord))
    assert record.reason == "the rank computes on cpu"
    assert record.energy_joules is None
    assert record.throttle_reasons is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_reports_energy_and_temperature():
    device = torch.device("cuda", 0)
    gauge = DeviceGauge(device)
    matrix = torch.randn(4096, 4096, device=device)
    for _ in range(200):
        matrix = (matrix @ matrix).tanh()
    torch.cuda.synchronize()
    time.sleep(0.2)
    record = gauge.read(0, 0, 0, 1)
    assert record is not None
    assert record.energy_joules is None or record.energy_joules > 0
    assert 0 < (record.temperature_celsius or 1) < 120
    assert (record.device_used_bytes or 0) > matrix.numel() * 4
