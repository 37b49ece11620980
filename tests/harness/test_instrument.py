"""Promise: timers book delays on the right phase, separate waiting from moving, and add up to the wall."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import pytest
import torch

from analysis.records.loading import load
from analysis.report.page import write_report
from analysis.steps import closure, rank_phase_costs, waits
from harness.cli import main
from harness.runs.heartbeat import HeartbeatWriter
from harness.runs.records import PhaseRecord, to_line
from harness.training.train import Trainer
from harness.training.world import World
from kfac_core.collectives import SplitWait, connect
from kfac_core.factors import Factors
from kfac_core.gradients import Gradients
from kfac_core.phases import COMM_PHASES, KFAC_PHASES
from kfac_core.second_order import SecondOrder
from tests.harness.checkpoint.runs import cell, new_attempt

DELAY, PERIOD = 0.4, 5  # seconds, several times what the collectives of a window take
KFAC = {"factor_update_steps": 1, "inverse_update_steps": PERIOD, "damping": 0.01}


@contextmanager
def late(trainer: Trainer, owner: Any, name: str) -> Iterator[None]:
    """Make a method sleep in the first step of every window."""
    original: Callable[..., Any] = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        if trainer.state.step % PERIOD == 0:
            time.sleep(DELAY)
        return original(*args, **kwargs)

    with patch.object(owner, name, slow):
        yield


@contextmanager
def late_batches(trainer: Trainer) -> Iterator[None]:
    original = trainer.workload.batches

    def slow(epoch: int, first: int = 0) -> Iterator[Any]:
        for batch in original(epoch, first):
            if trainer.state.step % PERIOD == 0:
                time.sleep(DELAY)
            yield batch

    with patch.object(trainer.workload, "batches", slow):
        yield


LATE: dict[str, Callable[[Trainer], AbstractContextManager[None]]] = {
    "data": late_batches,
    "forward": lambda trainer: late(trainer, trainer.workload, "loss"),
    "backward": lambda trainer: late(trainer, trainer.gradients, "clear"),
    "factor_compute": lambda trainer: late(trainer, Factors, "accumulate_local"),
    "inverse_compute": lambda trainer: late(trainer, SecondOrder, "solve"),
    "precondition": lambda trainer: late(trainer, Gradients, "read"),
    "update": lambda trainer: late(trainer, trainer.state.optimizer, "step"),
}


def windows(
    rank: int, world_size: int, folder: str, method: str, split: bool, late_phase: str = "", count: int = 4
) -> list[PhaseRecord]:
    """Train digits for `count` windows, an epoch each; rank 1 is late in a phase if one is named."""
    gloo = connect()
    communicator = SplitWait(gloo) if split else gloo
    world = World(rank, world_size, torch.device("cpu"), "gloo", communicator)
    training = {"global_batch_size": 256, "epochs": count, "window_steps": PERIOD}
    own = {"kfac": KFAC} if method != "sgd" else {}
    records: list[Any] = []
    heartbeat = HeartbeatWriter(Path(folder) / f"heartbeat-{rank}")
    trainer = Trainer(cell(method, world_size, training=training, **own), world, heartbeat, records.append)
    with LATE[late_phase](trainer) if rank == 1 and late_phase else nullcontext():
        trainer.run()
    return [record for record in records if isinstance(record, PhaseRecord)]


@pytest.mark.parametrize("phase", LATE)
def test_a_late_rank_is_late_in_its_phase_and_its_peer_waits(world, tmp_path, phase):
    prompt, slow = world(2).run(windows, str(tmp_path), "comm_opt", True, phase, 3)
    assert len(prompt) == len(slow) == 3

    # Every window is delayed alike, and load slows both ranks: what counts is by how much they differ.
    def later(of: Callable[[PhaseRecord], float]) -> float:
        return median(of(delayed) - of(other) for other, delayed in zip(prompt, slow, strict=True))

    def waited(record: PhaseRecord) -> float:
        assert record.wait_seconds is not None
        return sum(record.wait_seconds.values())

    def moved(record: PhaseRecord) -> float:
        return sum(record.seconds.get(comm, 0.0) for comm in COMM_PHASES) - waited(record)

    assert min(record.seconds[phase] for record in slow) >= DELAY
    assert later(lambda record: record.seconds[phase]) > DELAY / 2
    assert later(waited) < -DELAY / 2
    assert abs(later(moved)) < DELAY / 2
    assert all(moved(record) >= 0 for record in (*prompt, *slow))


@pytest.fixture(scope="module")
def split_ranks(world, tmp_path_factory):
    """Both ranks' windows with comm_opt and a measured wait."""
    return world(2).run(windows, str(tmp_path_factory.mktemp("split")), "comm_opt", True)


def test_waiting_is_part_of_its_phase_and_changes_neither_bytes_nor_calls(world, split_ranks, tmp_path):
    plain_ranks = world(2).run(windows, str(tmp_path), "comm_opt", False)
    for plain, split in zip(plain_ranks, split_ranks, strict=True):
        for before, after in zip(plain, split, strict=True):
            assert before.wait_seconds is None
            assert after.wait_seconds is not None
            assert set(after.wait_seconds) == {"gradient_comm", "factor_comm", "inverse_comm"}
            assert all(0 < after.wait_seconds[p] <= after.seconds[p] for p in after.wait_seconds)
            assert (after.calls, after.sent_bytes) == (before.calls, before.sent_bytes)


@pytest.fixture(scope="module")
def measured(world, split_ranks, tmp_path_factory):
    """A real study: sgd and comm_opt at two ranks, with and without a measured wait."""
    root = tmp_path_factory.mktemp("instrument") / "runs"
    plain_ranks = world(2).run(windows, str(root.parent), "sgd", False)
    for method, ranks in (("sgd", plain_ranks), ("comm_opt", split_ranks)):
        training = {"global_batch_size": 256, "epochs": 4, "window_steps": PERIOD}
        own = {"kfac": KFAC} if method != "sgd" else {}
        attempt = new_attempt(root, cell(method, 2, training=training, **own))
        for rank, records in enumerate(ranks):
            attempt.records(rank).write_text("".join(map(to_line, records)))
    return load(root / "test")


def test_every_window_of_every_rank_closes(measured):
    frame = closure(measured)
    assert len(frame) == 2 * 2 * 4
    # Medians: a busy machine may stop a rank between two readings of a clock, in some of the windows.
    middle = frame.groupby(["run", "rank"], observed=True)[["residual_share", "other_share"]].median()
    assert len(middle) == 2 * 2
    assert middle["residual_share"].max() <= 0.02
    assert middle["other_share"].max() <= 0.05


def test_tables_take_the_measured_wait_where_there_is_one(measured):
    arms = measured.cells.set_index("run")["arm"]
    found = waits(measured)
    assert dict(zip(found["run"].map(arms), found["measured"], strict=True)) == {
        "sgd": False,
        "comm_opt": True,
    }
    costs = rank_phase_costs(measured)
    of_kfac = costs[costs["run"].map(arms).eq("comm_opt") & costs["phase"].isin(found["phase"])]
    mean = of_kfac.groupby("phase", observed=True)["wait_seconds_per_step"].mean()
    own = found[found["run"].map(arms).eq("comm_opt")].set_index("phase")["wait_seconds_per_step"]
    for phase, seconds in own.items():
        assert seconds == pytest.approx(mean[phase])


def test_the_report_has_closure_timer_cost_and_whether_waiting_was_measured(measured, tmp_path, no_images):
    page = write_report(measured, tmp_path / "report").read_text()
    for words in ("closure: worst residual", "timers, per step", "measured", "bounds", "Ranks met before"):
        assert words in page
    assert "not measured" not in page


def test_windows_have_the_cost_of_their_timers(measured):
    frame = measured.windows
    entries = 5 * (5 + len(KFAC_PHASES))  # at least, per window with K-FAC
    assert (frame["instrument_seconds"] > 0).all()
    assert frame["instrument_seconds"].max() >= entries * 2e-7  # no machine enters a phase faster
    assert frame["instrument_seconds"].sum() < 0.05 * frame["wall_seconds"].sum()  # tiny steps; see results/


@pytest.mark.ranks
def test_a_site_with_split_wait_has_its_waiting_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("KRONSCALE_LOCKS", str(tmp_path / "locks"))
    (tmp_path / "site.yaml").write_text("launcher: local\noversubscribe: true\nsplit_wait: true\n")
    (tmp_path / "tiny.yaml").write_text(
        "sweep: tiny\nworkload: digits\ntarget: {metric: accuracy, at_least: 0.999}\n"
        "training: {global_batch_size: 256, epochs: 2, window_steps: 5}\noptimizer: {lr: 0.1}\n"
        "methods: [{name: sgd}]\ngrid: {world_size: [1, 2]}\nrepeats: 1\n"
    )
    words = ["run", "-f", str(tmp_path / "tiny.yaml"), "--site", str(tmp_path / "site.yaml")]
    assert main([*words, "--runs", str(tmp_path / "runs")]) == 0
    windows = load(tmp_path / "runs" / "tiny").windows
    sizes = windows["run"].astype("str").str.extract(r"-p(\d)-")[0]
    waited = windows["wait_seconds.gradient_comm"]
    assert waited[sizes == "1"].isna().all()  # there is no peer to wait for
    assert (sizes == "2").sum() == 2 * 2
    assert (waited[sizes == "2"] > 0).all()
    assert (waited <= windows["seconds.gradient_comm"])[sizes == "2"].all()
