"""Promise: a sweep sets nothing that its runs do not read, nor what cannot be meant in a run of that length.

A method's own field that has no effect is refused. A shared field or an axis is left out of the methods that
do not read it, and refused if none does. Settings that mean the same make cells with the same id.
"""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

from harness.cell import Cell
from harness.errors import SiteError, SweepError
from harness.launchers.launch import Launch
from harness.launchers.site_profile import Site, read_site
from harness.runs.store import Attempt, SweepFolder
from harness.study.sweep import read_sweep
from harness.workloads import WORKLOADS
from harness.workloads.description import METRIC_RANGES
from kfac_core.config import PAPERS, KFACConfig
from kfac_core.placement.balance import measured
from kfac_core.placement.placement import FactorShape, LayerShape
from kfac_core.placement.strategies import place

BASE = {
    "sweep": "s",
    "workload": "digits",
    "target": {"metric": "accuracy", "at_least": 0.97},
    "training": {"global_batch_size": 64, "epochs": 30},
    "optimizer": {"lr": 0.1},
    "methods": [{"name": "arm"}],
    "world_size": 2,
    "seeds": [0],
}


def read(folder: Path, *changes: dict[str, object], overrides=()):
    content = {key: dict(value) if isinstance(value, dict) else value for key, value in BASE.items()}
    for change in changes:
        for key, value in change.items():
            if key in ("training", "optimizer", "target") and isinstance(value, dict):
                content[key] = {**content[key], **value}
            else:
                content[key] = value
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return read_sweep(path, overrides).cells


def error_line(folder: Path, *changes: dict[str, object], overrides=()) -> str:
    with pytest.raises(SweepError) as error:
        read(folder, *changes, overrides=overrides)
    message = str(error.value)
    assert "\n" not in message
    return message.partition(": ")[2]


def arm(**sections: object) -> dict[str, object]:
    return {"methods": [{"name": "arm", **sections}]}


VGG = {"workload": {"name": "cifar10", "options": {"model": "vgg16"}}}
KFAC = {"strategy": "comm_opt"}

COCO = {
    "workload": {"name": "coco", "options": {"backbone": "resnet50.pth"}},
    "target": {"metric": "box_map", "at_least": 0.3},
}
LOSS = {"metric": "loss", "at_least": None, "at_most": 2.0}
COSTS = {"inverse_seconds": [[64, 0.1], [128, 0.2]]}

WITHOUT_EFFECT = [
    ({"training": {"sync_batch_norm": True}},
     "training.sync_batch_norm has no effect with workload digits: its network has no batch "
     "normalisation, and no other method reads it; remove it"),
    ({**COCO, **arm(training={"sync_batch_norm": True})},
     "methods[0].training.sync_batch_norm has no effect with workload coco: batch normalisation is frozen"),
    (arm(optimizer={"name": "adam", "momentum": 0.9}),
     "methods[0].optimizer.momentum has no effect with adam; it is for sgd, rmsprop, lars, muon; remove it "
     "(method arm)"),
    ({"optimizer": {"decay_factor": 0.5}}, "optimizer.decay_factor has no effect without decay_epochs, and"),
    ({"optimizer": {"decay_factor": 1.0, "decay_epochs": [3]}},
     "optimizer.decay_factor=1 leaves decay_epochs without effect; remove both (method arm, world_size=2)"),
    ({"optimizer": {"name": "adam"}, "grid": {"optimizer.momentum": [0.5, 0.9]}},
     "grid.optimizer.momentum[0] has no effect with adam; it is for sgd, rmsprop, lars, muon, and no other"),
    ({"grid": {"kfac.damping": [0.1, 0.2]}}, "grid.kfac.damping[0] has no effect without a kfac section,"),
    (arm(training={"accumulate": 4, "factor_micro_batches": 1}),
     "methods[0].training.factor_micro_batches has no effect without a kfac section"),
    (arm(kfac=KFAC, training={"factor_micro_batches": 1}),
     "methods[0].training.factor_micro_batches has no effect without accumulate > 1"),
    ({"workload": {"name": "bert", "options": {"documents": "titles"}}, "target": LOSS},
     "workload.options.documents has no effect with next_sentence=False, and no other method reads it"),
    (arm(kfac={"strategy": "d_kfac", "assignment": "balanced"}),
     "methods[0].kfac.assignment has no effect with strategy=d_kfac: all ranks do all work"),
    (arm(kfac={"strategy": "mem_opt", "assignment": "round_robin", "costs": COSTS}),
     "methods[0].kfac.costs has no effect with strategy=mem_opt, which assigns layers by round robin here"),
    (arm(kfac={"damping": {"initial": 0.1, "factor": 1, "at": [3]}}),
     "methods[0].kfac.damping.factor=1 changes nothing; write damping: 0.1 (method arm, world_size=2)"),
    (arm(kfac={"damping": {"initial": 0.1, "factor": 0.5, "at": [30]}}),
     "methods[0].kfac.damping.at=[30.0] has no milestone in the 30 epochs with K-FAC (method arm,"),
]  # fmt: skip

WRONG_FOR_THE_RUN = [
    ({"optimizer": {"decay_epochs": [1, 1]}}, "[1.0, 1.0] must be ascending, each epoch once"),
    ({"optimizer": {"decay_epochs": [9, 30]}}, "must be > 0 and < epochs=30, got 30"),
    ({"optimizer": {"warmup_epochs": 31}}, "warmup_epochs=31 must be <= epochs=30"),
    ({"training": {"evaluate_every_epochs": 31}}, "evaluate_every_epochs=31 must be <= epochs=30"),
    ({"training": {"kfac_start_epoch": 30}, **arm(kfac=KFAC)}, "training.kfac_start_epoch=30 must be <"),
    ({"target": {"at_least": 97}}, "target.at_least=97 must be in (0, 1], as accuracy is"),
    ({"target": {**LOSS, "at_most": 0}}, "target.at_most=0 must be in (0, inf], as loss is"),
    ({"optimizer": {"lr_scaling": "linear"}}, "optimizer.lr_scaling=linear multiplies lr by world_size,"),
    ({"optimizer": {"nesterov": True, "momentum": 0}}, "optimizer.nesterov needs momentum > 0"),
    (arm(kfac={"factor_update_steps": 10,
               "inverse_update_steps": {"initial": 100, "factor": 0.1, "at": [5, 10]}}),
     "inverse_update_steps=1 is below factor_update_steps=10 from epoch 10 on"),
    (arm(kfac={"factor_update_steps": {"initial": 10, "factor": 100, "at": [5]},
               "inverse_update_steps": 100}),
     "inverse_update_steps=100 is below factor_update_steps=1000 from epoch 5 on"),
    (arm(kfac={"factor_update_steps": 1, "inverse_update_steps": {"initial": 0.1, "factor": 2, "at": [5]}}),
     "kfac.inverse_update_steps.initial=0.1 must be >= 1 step"),
    (arm(kfac={"skip": ["a", "a"]}), "kfac.skip=['a', 'a'] names a pattern twice"),
    ({"methods": [{"name": "comm_opt"}]}, "methods[0].name='comm_opt' is a strategy of K-FAC but the"),
    ({"methods": [{"name": "mem_opt", "kfac": {}}]}, "name='mem_opt' has strategy=comm_opt; set kfac"),
    ({"methods": [{"name": "adam"}]}, "name='adam' has optimizer.name=sgd; set optimizer.name: adam, or"),
    ({"seeds": [2**32]}, "seeds[0] must be < 4294967296, got 4294967296"),
    ({"world_size": 100_001}, "world_size must be <= 100000, got 100001"),
    ({"workload": {"name": "digits", "options": {"width": 0}}}, "width=0 is not allowed; use a value >= 1"),
    ({"workload": {"name": "cifar10", "options": {"label_smoothing": -0.1}}}, "use a value in [0, 1)"),
    ({**VGG, "training": {"global_batch_size": 2}},
     "training.global_batch_size=2 makes a local batch of 1, but vgg16 normalises over 2 examples or more"),
    ({"workload": {"name": "imagenet", "options": {"model": "inception_v3", "image_size": 74}}},
     "image_size=74 is too small for the network; use 75 or more"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), WITHOUT_EFFECT)
def test_what_nothing_reads_is_refused(change, message, tmp_path):
    assert error_line(tmp_path, change).startswith(message)


@pytest.mark.parametrize(("change", "message"), WRONG_FOR_THE_RUN)
def test_what_the_run_cannot_mean_is_refused(change, message, tmp_path):
    assert message in error_line(tmp_path, change)


def test_shared_settings_reach_the_methods_that_read_them_and_no_others(tmp_path):
    methods = [{"name": "sgd"}, {"name": "a", "optimizer": {"name": "adam"}}]
    sgd, adam = read(tmp_path, {"methods": methods, "optimizer": {"momentum": 0.5}})
    (alone,) = read(tmp_path, {"methods": methods[1:]})
    assert (sgd.optimizer.momentum, adam.optimizer.momentum) == (0.5, 0.9)
    assert adam.id == alone.id
    message = error_line(tmp_path, {"optimizer": {"name": "adam"}}, overrides=["optimizer.momentum=0.5"])
    assert message.startswith("--set optimizer.momentum has no effect with adam")
    cells = read(
        tmp_path, {"methods": methods, "grid": {"optimizer.momentum": [0, 0.5], "world_size": [1, 2]}}
    )
    assert [(cell.method, cell.optimizer.momentum, cell.world_size) for cell in cells] == [
        ("sgd", 0.0, 1), ("sgd", 0.0, 2), ("sgd", 0.5, 1), ("sgd", 0.5, 2), ("a", 0.9, 1), ("a", 0.9, 2),
    ]  # fmt: skip


def test_a_method_may_say_that_something_is_off(tmp_path):
    off = {"name": "nlcg", "weight_decay": 0, "nesterov": False}
    (said,) = read(tmp_path, {"optimizer": {"weight_decay": 1e-4}, "methods": [
        {"name": "arm", "optimizer": off}, {"name": "sgd"}]})[:1]  # fmt: skip
    (silent,) = read(tmp_path, arm(optimizer={"name": "nlcg"}))
    assert said.id == silent.id


@pytest.mark.parametrize(
    ("explicit", "short"),
    [
        ({"assignment": "balanced"}, {}),
        ({"split_factors": "always"}, {}),
        ({"factor_dtype": "float32", "inverse_dtype": "float32"}, {}),
        ({"factor_dtype": "float64", "inverse_dtype": "float64"}, {"factor_dtype": "float64"}),
        ({"strategy": "dp_kfac", "assignment": "round_robin"}, {"strategy": "dp_kfac"}),
        ({"overlap_factors": False, "costs": None, "skip": []}, {}),
    ],
)
def test_an_explicit_default_has_the_id_of_none(explicit, short, tmp_path):
    (one,) = read(tmp_path, arm(kfac=explicit))
    (other,) = read(tmp_path, arm(kfac=short))
    assert one.id == other.id


def test_the_implied_window_has_the_id_of_none(tmp_path):
    for kfac, steps in ((None, 100), ({"inverse_update_steps": 20}, 20)):
        method = arm() if kfac is None else arm(kfac=kfac)
        (one,) = read(tmp_path, method, {"training": {"window_steps": steps}})
        (implied,) = read(tmp_path, method)
        (other,) = read(tmp_path, method, {"training": {"window_steps": 7}})
        assert one.id == implied.id != other.id
        assert one.window_steps == steps


@pytest.mark.parametrize("strategy", ["hybrid_opt", "mem_opt", "d_kfac"])
def test_a_strategy_reads_assignment_and_costs_exactly_where_a_sweep_may_set_them(strategy, tmp_path):
    dims = (576, 64, 128, 1024, 32, 256, 90, 700)
    layers = [
        LayerShape(f"l{index}", FactorShape(a), FactorShape(g)) for index, (a, g) in enumerate(pairwise(dims))
    ]
    fraction = {"grad_worker_fraction": 0.5} if strategy == "hybrid_opt" else {}
    placements = {
        assignment: place(KFACConfig.sc20(strategy=strategy, assignment=assignment, **fraction), layers, 4)
        for assignment in ("balanced", "round_robin")
    }
    reads_assignment = placements["balanced"] != placements["round_robin"]
    for assignment in ("balanced", "round_robin"):
        config = KFACConfig.sc20(strategy=strategy, assignment=assignment, **fraction)
        flat = place(config, layers, 4, measured({64: 1.0, 1024: 1.0 + 1e-9}))
        costs = {"inverse_seconds": [[64, 1.0], [1024, 2.0]]}
        text = {"strategy": strategy, **fraction}
        for field, value, read_here in (
            ("assignment", assignment, reads_assignment),
            ("costs", costs, flat != placements[assignment]),
        ):
            own = {**text, field: value, **({"assignment": assignment} if reads_assignment else {})}
            if read_here:
                assert read(tmp_path, arm(kfac=own))
            else:
                assert f"kfac.{field} has no effect" in error_line(tmp_path, arm(kfac=own))


def test_every_metric_has_a_range_and_every_ignored_option_exists():
    for card in WORKLOADS.values():
        assert set(card.metrics) <= set(METRIC_RANGES)
        for (option, value), ignored in card.ignored.items():
            assert {option, *ignored} <= set(card.options)
            assert type(value) is type(card.options[option])


SITES = [
    (
        "launcher: local\nslurm: {ranks_per_node: 2}\n",
        "2: slurm has no effect with launcher=local; remove it",
    ),
    (
        "launcher: slurm\ncpus: 4\nslurm: {ranks_per_node: 2}\n",
        "2: cpus has no effect with launcher=slurm, which requests what each cell needs; remove it",
    ),
    ("gpus: 2\n", "1: gpus has no effect with gpus_per_rank=0; remove it"),
    (
        "launcher: slurm\nslurm:\n  ranks_per_node: 2\n  gpus_by: gres\n",
        "4: slurm.gpus_by has no effect with gpus_per_rank=0; remove it",
    ),
    ("traced_steps: [9, 4]\n", "1: traced_steps=[9, 4] must be [first, end] with 0 <= first < end"),
]


@pytest.mark.parametrize(("text", "message"), SITES)
def test_what_a_site_does_not_read_is_refused(text, message, tmp_path):
    path = tmp_path / "here.yaml"
    path.write_text(text)
    with pytest.raises(SiteError) as error:
        read_site(str(path))
    assert str(error.value) == f"{path}:{message}"


def test_a_site_may_say_that_something_is_off_and_shipped_sites_are_read(tmp_path):
    path = tmp_path / "here.yaml"
    path.write_text("gpus: 0\noversubscribe: false\nsplit_wait: false\nslurm: null\ntraced_steps: [0, 1]\n")
    assert read_site(str(path)).traced_steps == (0, 1)
    for shipped in Path("jobs/sites").glob("*.yaml"):
        assert read_site(shipped.stem).name == shipped.stem


def test_a_stored_launch_with_fields_of_an_earlier_version_is_read(tmp_path):
    site = {**Site(name="here").model_dump(mode="json"), "single_copy": True, "ptrace_any": False}
    launch = Launch(
        launcher="local", site=Site(name="here"), cpus_per_rank=1, host="h", user="u", submitted_at=1.0
    )
    (tmp_path / "launch.json").write_text(json.dumps({**launch.to_dict(), "site": site}))
    assert Launch.read(Attempt(tmp_path)) == launch


def test_a_stored_cell_with_such_settings_keeps_its_id_and_is_read(tmp_path):
    cell = Cell.model_validate(
        {
            "sweep": "s",
            "workload": {"name": "digits", "options": {"width": 16}},
            "method": "arm",
            "target": {"metric": "accuracy", "at_least": 97},
            "training": {"global_batch_size": 64, "epochs": 3, "window_steps": 100},
            "optimizer": {
                "name": "adam", "lr": 0.1, "momentum": 0.5, "lr_scaling": "linear", "warmup_epochs": 5,
                "decay_epochs": [2, 1, 1, -5, 9],
            },
            "kfac": {
                **PAPERS["sc20"], "assignment": "balanced", "split_factors": "always", "skip": ["x", "x"],
            },
            "world_size": 2,
        }
    )  # fmt: skip
    assert cell.id == "arm-p2-s0-b8eda25c53"  # as before such settings were refused
    folder = SweepFolder(tmp_path / "s").stage(cell)
    assert folder.cell() == cell


def test_the_smallest_local_batch_counts_all_ranks_where_they_normalise_together(tmp_path):
    assert read(tmp_path, VGG, {"training": {"global_batch_size": 2, "sync_batch_norm": True}})
