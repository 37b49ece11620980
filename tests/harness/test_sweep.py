"""Promise: a sweep file expands to exactly the cells that it describes, in the order of the file."""

from itertools import product
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.cell import Cell
from harness.errors import SweepError
from harness.runs.arms import differences
from harness.study.sweep import DEFAULT_REPEATS, read_sweep
from kfac_core import KFACConfig

BASE = """\
sweep: s
workload: digits
target: {metric: accuracy, at_least: 0.97}
training: {global_batch_size: 64, epochs: 30}
optimizer: {lr: 0.1}
"""


def read(folder: Path, text: str, *overrides: str):
    path = folder / "s.yaml"
    path.write_text(BASE + text)
    return read_sweep(path, overrides)


def test_fields_of_methods_override_shared_ones(tmp_path):
    methods = "methods: [{name: a}, {name: b, optimizer: {momentum: 0}, kfac: {solver: inverse}}]\n"
    a, b = read(tmp_path, methods + "kfac: {damping: 0.003}\nworld_size: 1\nseeds: [7]\n").cells
    assert (a.kfac, a.optimizer.momentum, a.seed) == (None, 0.9, 7)
    many = read(tmp_path, methods + "world_size: 1\n").cells
    assert [cell.seed for cell in many[:DEFAULT_REPEATS]] == list(range(DEFAULT_REPEATS))
    assert (b.kfac.solver, b.kfac.damping, b.optimizer.momentum, b.optimizer.lr) == (
        "inverse",
        0.003,
        0.0,
        0.1,
    )


def test_a_papers_settings_hold_where_the_sweep_says_nothing(tmp_path):
    methods = "methods: [{name: a, kfac: {solver: inverse}}, {name: b, kfac: {paper: dp_kfac}}]\n"
    rest = "world_size: 1\nseeds: [0]\n"
    a, b = read(tmp_path, f"{methods}kfac: {{damping: 0.03, paper: sc20}}\n{rest}").cells
    assert a.kfac == KFACConfig.sc20(damping=0.03, solver="inverse")
    assert b.kfac == KFACConfig.dp_kfac()
    with pytest.raises(SweepError, match=r"kfac\.paper='sc19' is not one of sc20, kaisa, dp_kfac"):
        read(tmp_path, f"{methods}kfac: {{paper: sc19}}\n{rest}")


def test_the_command_line_overrides_methods_with_yaml_values(tmp_path):
    methods = "methods: [{name: a, training: {epochs: 3}}, {name: b, kfac: {damping: 1}}]\nworld_size: 1\n"
    overrides = ("training.epochs=5", "kfac.damping=1e-3", "repeats=2")
    cells = read(tmp_path, methods, *overrides).cells
    assert [cell.training.epochs for cell in cells] == [5, 5, 5, 5]
    assert [cell.kfac and cell.kfac.damping for cell in cells] == [None, None, 0.001, 0.001]


def test_costs_are_part_of_a_cell_and_have_short_names(tmp_path):
    tables = [
        "{inverse_seconds: [[64, 0.0001], [576, 0.01]]}",
        "{inverse_seconds: [[64, 0.0001], [576, 0.02]]}",
    ]
    grid = f"grid: {{world_size: [2], kfac.costs: [null, {', '.join(tables)}]}}\n"
    text = "methods: [{name: a, kfac: {}}]\nseeds: [0]\n" + grid
    bare, one, other = cells = read(tmp_path, text).cells
    assert (bare.kfac.costs, one.kfac.costs.inverse_seconds) == (None, ((64, 1e-4), (576, 1e-2)))
    assert len({cell.content_hash for cell in cells}) == 3
    assert Cell.model_validate(one.model_dump(mode="json")) == one
    names = differences(cells)
    assert names[bare.id] == ""
    assert len({names[one.id], names[other.id]}) == 2
    assert all(
        name.startswith("inverse_seconds=((64, 0.0001), (576,") and len(name) <= 60
        for name in (names[one.id], names[other.id])
    )


def test_numbers_and_text_are_read_as_yaml_1_2(tmp_path):
    text = "about: no\nmethods: [{name: on, optimizer: {weight_decay: 1e-3}}]\nworld_size: 08\n"
    sweep = read(tmp_path, text)
    assert (sweep.about, sweep.cells[0].method) == ("no", "on")
    assert (sweep.cells[0].optimizer.weight_decay, sweep.cells[0].world_size) == (0.001, 8)


def test_kfac_axes_merge_equal_points_of_first_order_methods_only(tmp_path):
    methods = "methods: [{name: sgd}, {name: k, kfac: {}}]\nworld_size: 1\nrepeats: 1\n"
    zipped = "zip: [{kfac.damping: [1, 2, 3], optimizer.lr: [0.1, 0.1, 0.2]}]\n"
    cells = read(tmp_path, methods + zipped).cells
    assert [(cell.method, cell.optimizer.lr) for cell in cells] == [
        ("sgd", 0.1), ("sgd", 0.2), ("k", 0.1), ("k", 0.1), ("k", 0.2),
    ]  # fmt: skip


def test_a_method_axis_selects_methods_and_zips_with_their_fields(tmp_path):
    methods = "methods: [{name: a}, {name: b}, {name: c}]\nworld_size: 1\nrepeats: 1\n"
    cells = read(tmp_path, methods + "zip: [{method: [c, a], optimizer.lr: [0.3, 0.2]}]\n").cells
    assert [(cell.method, cell.optimizer.lr) for cell in cells] == [("a", 0.2), ("c", 0.3)]


def test_exclude_drops_cells_also_those_that_would_be_invalid_and_matches_defaults(tmp_path):
    text = """\
methods: [{name: sgd}, {name: h, kfac: {strategy: hybrid_opt, grad_worker_fraction: 0.5}}]
grid: {world_size: [1, 2]}
repeats: 2
exclude: [{method: h, world_size: 1}, {method: sgd, seed: 1}]
"""
    cells = read(tmp_path, text).cells
    assert [(cell.method, cell.world_size, cell.seed) for cell in cells] == [
        ("sgd", 1, 0), ("sgd", 2, 0), ("h", 2, 0), ("h", 2, 1),
    ]  # fmt: skip
    text = "methods: [{name: a, kfac: {}}, {name: b}]\nworld_size: 1\nexclude: [{kfac.strategy: comm_opt}]\n"
    assert {cell.method for cell in read(tmp_path, text).cells} == {"b"}


def test_a_workloads_defaults_are_part_of_the_cell(tmp_path):
    methods = "methods: [{name: a}]\nworld_size: 1\nseeds: [0]\n"
    implied = read(tmp_path, methods).cells[0]
    spelled = read(tmp_path, methods, "workload={name: digits, options: {width: 16}}").cells[0]
    assert implied.workload.options == {"width": 16, "network": "small"}
    assert implied.id == spelled.id


WORLDS, RATES, EPOCHS, METHODS = (1, 2, 4, 8), (0.1, 0.2, 0.4), (1, 2, 3), ("a", "b")


@settings(max_examples=30)
@given(
    worlds=st.lists(st.sampled_from(WORLDS), min_size=1, unique=True),
    rates=st.lists(st.sampled_from(RATES), min_size=1, unique=True),
    epochs=st.lists(st.sampled_from(EPOCHS), min_size=3, max_size=3, unique=True),
    excluded=st.lists(
        st.fixed_dictionaries(
            {"world_size": st.sampled_from(WORLDS)},
            optional={
                "method": st.sampled_from(METHODS),
                "optimizer.lr": st.sampled_from(RATES),
                "training.epochs": st.sampled_from(EPOCHS),
            },
        ),
        max_size=3,
    ),
    seeds=st.integers(1, 3),
)
def test_grid_zip_and_exclude_are_the_filtered_product(
    tmp_path_factory, worlds, rates, epochs, excluded, seeds
):
    zipped = list(zip(rates, epochs, strict=False))
    product_of_all = [
        {"method": method, "world_size": world, "optimizer.lr": rate, "training.epochs": epoch, "seed": seed}
        for method, world, (rate, epoch), seed in product(METHODS, worlds, zipped, range(seeds))
    ]
    dropping = [
        entry for entry in excluded if any(entry.items() <= point.items() for point in product_of_all)
    ]
    expected = [
        point for point in product_of_all if not any(entry.items() <= point.items() for entry in dropping)
    ]
    content = {
        "methods": [{"name": "a"}, {"name": "b", "optimizer": {"momentum": 0.5}, "kfac": {}}],
        "grid": {"world_size": worlds},
        "zip": [{"optimizer.lr": [r for r, _ in zipped], "training.epochs": [e for _, e in zipped]}],
        "exclude": dropping,
        "repeats": seeds,
    }
    folder = tmp_path_factory.mktemp("sweep")
    if not expected:
        with pytest.raises(SweepError, match="no cell is left"):
            read(folder, yaml.safe_dump(content))
        return
    got = [
        (cell.method, cell.world_size, cell.optimizer.lr, cell.training.epochs, cell.seed)
        for cell in read(folder, yaml.safe_dump(content)).cells
    ]
    assert got == [tuple(point.values()) for point in expected]
