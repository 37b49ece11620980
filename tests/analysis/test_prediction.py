"""Promise: predictions have the right limits, widen beyond what was measured, and meet what was published."""

from __future__ import annotations

import csv
import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis.prediction.answers import predictions
from analysis.prediction.choice import choose
from analysis.prediction.errors import PredictionError
from analysis.prediction.laws import Seconds, wire_bytes
from analysis.prediction.loads import RankLoads
from analysis.prediction.machine import RTX_2080_TI
from analysis.prediction.networks import Network, network_named, networks
from analysis.prediction.work import Exchange, Setup, Work
from harness.cli import main
from jobs.experiments.network_tables import NETWORKS, table
from kfac_core.config import STRATEGIES, KFACConfig
from kfac_core.phases import COMM_PHASES, Phase
from kfac_core.placement import FactorShape, LayerShape

RESNET = network_named("resnet50")
EVERY = {"factor_update_steps": 1, "inverse_update_steps": 1}

# shared reference "sizes" (derived independently): layers, gradient, A, G, A triangle, G triangle, eigen data
SIZES = {
    "resnet32": (32, 461882, 4048474, 54116, 2029107, 27631, 4113476),
    "resnet110": (110, 1719866, 15370330, 193892, 7703139, 98975, 15604228),
    "resnet50": (54, 25503912, 124642410, 29209152, 62348671, 14618356, 153934054),
    "resnet101": (105, 44443816, 233825386, 49263168, 116970623, 24658420, 283258086),
    "resnet152": (156, 60041384, 323740778, 65778240, 161955199, 32927476, 389765350),
}
# trained parameters that the networks' public releases state
PARAMETERS = {
    "resnet50": 25_557_032, "resnet101": 44_549_160, "resnet152": 60_192_808, "densenet201": 20_013_928,
    "gpt2": 124_439_808,
}  # fmt: skip


def phases(strategy: str, world_size: int, batch: int = 32, name: str = "resnet50", **options):
    model = RTX_2080_TI.model(network_named(name), KFACConfig(solver="inverse", **options), batch)
    return model.arms[strategy].phases(world_size)


def total(*arguments, **options) -> float:
    return Seconds.sum(phases(*arguments, **options).values()).central


def test_the_predicted_memory_of_a_factor_beyond_the_bound_is_that_of_its_diagonal():
    words = 30_522
    head = LayerShape("head", FactorShape(769), FactorShape(words))
    before, after = (
        Work(Setup(Network("lm", (head,), 0), KFACConfig(strategy="mem_opt", max_factor_dim=bound), 1, 1))
        for bound in (None, 8192)
    )
    spared = words * words - words
    assert before.state_bytes["factors"][0] - after.state_bytes["factors"][0] == 4 * spared


@pytest.mark.parametrize("name", SIZES)
def test_factors_and_gradients_have_the_published_sizes(name):
    shapes = network_named(name).shapes
    factors = [factor for shape in shapes for factor in (shape.a, shape.g)]
    assert SIZES[name] == (
        len(shapes),
        sum(shape.gradient_elements for shape in shapes),
        sum(shape.a.elements for shape in shapes),
        sum(shape.g.elements for shape in shapes),
        sum(shape.a.packed_elements for shape in shapes),
        sum(shape.g.packed_elements for shape in shapes),
        sum(factor.elements + factor.dim for factor in factors),
    )


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_public_networks(name):
    assert network_named(name).parameters == PARAMETERS[name]


def test_the_flops_of_resnet_50_are_the_published_four_billion_multiplications():
    assert RESNET.forward_flops == pytest.approx(2 * 4.09e9, rel=0.01)  # torchvision's documentation


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_the_stored_table_is_what_kfac_finds_in_the_network_that_ranks_build(name):
    needs = {"densenet201": "torchvision", "bert_base": "transformers", "bert_large": "transformers",
             "gpt2": "transformers"}  # fmt: skip
    if name in needs and importlib.util.find_spec(needs[name]) is None:
        pytest.skip(f"needs {needs[name]}")
    found, stored = table(NETWORKS[name]), network_named(name)
    layers = zip(stored.shapes, stored.positions, strict=True)
    assert found["layers"] == [[shape.name, shape.a.dim, shape.g.dim, rows] for shape, rows in layers]
    sizes = stored.other_parameters, stored.forward_flops, stored.activations
    assert sizes == (found["other_parameters"], found["forward_flops"], found["activations"])


def test_every_network_of_the_script_is_stored_and_others_are_an_error_that_lists_them():
    assert networks().keys() == NETWORKS.keys()
    with pytest.raises(PredictionError, match=r"'resnet51' is not one of .*did you mean resnet5"):
        network_named("resnet51")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_sends_nothing_and_all_strategies_cost_the_same_on_it(strategy):
    assert not set(phases(strategy, 1)) & {str(phase) for phase in COMM_PHASES}
    assert total(strategy, 1) == pytest.approx(total("comm_opt", 1))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_with_ever_rarer_updates_only_the_work_of_every_step_remains(strategy):
    rare = phases(strategy, 64, factor_update_steps=10**9, inverse_update_steps=10**9)
    updates = (Phase.FACTOR_COMPUTE, Phase.FACTOR_COMM, Phase.INVERSE_COMPUTE, Phase.INVERSE_COMM)
    assert sum(rare[phase].central for phase in updates if phase in rare) < 1e-6
    assert rare[Phase.PRECONDITION].central > 1e-4


@settings(max_examples=25)
@given(st.sampled_from(STRATEGIES), st.integers(1, 10), st.integers(1, 64), st.integers(1, 5))
def test_rarer_updates_and_smaller_batches_never_cost_more(strategy, world_log, batch, factor):
    size, often = 2**world_log, {"factor_update_steps": 2, "inverse_update_steps": 20}
    rare = {field: factor * steps for field, steps in often.items()}
    base = total(strategy, size, batch, "resnet20", **often)
    assert total(strategy, size, batch, "resnet20", **rare) <= base * (1 + 1e-12)
    assert total(strategy, size, batch + 1, "resnet20", **often) >= base


def test_buckets_that_are_sent_early_carry_the_same_bytes():
    for strategy in STRATEGIES:
        sent = set()
        for early in (False, True):
            fraction = 1.0 if strategy == "hybrid_opt" else None
            config = KFACConfig(strategy=strategy, grad_worker_fraction=fraction, overlap_factors=early)
            exchanges = Work(Setup(RESNET, config, 4, 1)).exchanges
            sent.add(sum(sum(one.sizes) for one in exchanges if one.phase == Phase.FACTOR_COMM))
        assert len(sent) == 1


def test_published_steps_of_64_gpus_are_met_within_15_percent_and_as_well_as_the_bounds_say():
    """All but ResNet-50's two inverse phases and single-GPU times are held out."""
    names = {"ResNet-50": "resnet50", "ResNet-152": "resnet152", "DenseNet-201": "densenet201"}
    with Path("results/published/spd_kfac_breakdown.csv").open() as lines:
        rows = [
            row for row in csv.DictReader(lines) if row["algorithm"] != "SPD-KFAC" and row["model"] in names
        ]
    errors = []
    for row in rows:
        strategy = {"D-KFAC": "d_kfac", "MPD-KFAC": "mpd_kfac"}[row["algorithm"]]
        config, batch = KFACConfig(strategy=strategy, solver="inverse", **EVERY), int(row["local_batch_size"])
        network = network_named(names[row["model"]])
        found = phases(strategy, 64, batch, network.name, **EVERY)
        loads = RankLoads(Setup(network, config, 64, batch, layerwise=True), "nccl", 64)  # as in its release
        moved = sum(RTX_2080_TI.links.law(one.operation).at(one.terms()) for one in loads.exchanged
                    if one.phase != Phase.PRECONDITION_COMM)  # fmt: skip
        ours = {Phase.PRECONDITION, Phase.SCALE, Phase.UPDATE}  # not in the published breakdown
        computed = sum(s.central for phase, s in found.items() if phase not in {*ours, *COMM_PHASES})
        errors.append(math.log(1e3 * (computed + moved) / float(row["total_ms"])))
    assert len(errors) == RTX_2080_TI.errors
    assert max(map(abs, errors)) < 0.15
    assert math.hypot(*errors) / math.sqrt(len(errors)) == pytest.approx(RTX_2080_TI.error, abs=0.005)


def test_beyond_the_largest_measured_world_bounds_widen():
    model = RTX_2080_TI.model(RESNET, KFACConfig(solver="inverse"), 32)
    widths = []
    for size in (64, 256, 1024, 4096):
        seconds = model.predict("mem_opt", size).seconds
        assert 0 < seconds.low < seconds.central < seconds.high
        widths.append(seconds.high / seconds.low)
    assert widths == sorted(widths)
    assert widths[-1] > 2 * widths[0]


def test_a_ring_all_reduce_is_bound_by_twice_its_buffer():
    exchange = Exchange(Phase.GRADIENT_COMM, "all_reduce", tuple(range(8)), (1000,), 1)
    assert wire_bytes("gloo", exchange) == 2 * 7 / 8 * 1000


@pytest.mark.parametrize("operation", ["gather_parts", "reduce_parts"])
def test_parts_sent_directly_are_bound_by_the_busiest_owner_or_by_all_others_parts(operation):
    def bound(*sizes: int) -> float:
        return wire_bytes("gloo", Exchange(Phase.INVERSE_COMM, operation, tuple(range(8)), sizes, 1))

    assert bound(800, *[0] * 7) == 7 * 800
    assert bound(*[100] * 8) == 7 / 8 * 800
    assert bound(150, 150, 150, 150, 150, 50, 0, 0) == 7 * 150
    assert wire_bytes("gloo", Exchange(Phase.INVERSE_COMM, operation, (0, 1), (10, 30), 1)) == 30


def test_every_fraction_of_a_world_is_a_candidate_and_what_does_not_fit_is_left_out():
    model = RTX_2080_TI.model(RESNET, KFACConfig(solver="inverse"), 32)
    found = choose(model, 12).candidates
    fractions = {one.step.config.grad_worker_fraction for one in found if one.step.config} - {None}
    assert fractions == {workers / 12 for workers in (2, 3, 4, 6)}
    peaks = sorted(one.peak_bytes for one in found)
    fitting = choose(model, 12, memory_bytes=int(peaks[len(peaks) // 2]))
    assert {one.name for one in fitting.candidates} == {
        one.name for one in found if one.peak_bytes <= peaks[len(peaks) // 2]
    }
    with pytest.raises(PredictionError, match="nothing fits at 12 ranks: sgd: needs"):
        choose(model, 12, memory_bytes=1)


def test_a_solver_that_was_not_measured_is_an_error():
    with pytest.raises(
        PredictionError, match="solver=eigen was not measured on 64 RTX 2080 Ti; it has inverse"
    ):
        predictions(RTX_2080_TI.model(RESNET, KFACConfig(), 32), [2])


@pytest.mark.slow
def test_resnet_152_at_4096_ranks_takes_seconds_and_no_torch():
    program = (
        "import sys; from harness.cli import main\n"
        "code = main(['predict', '--model', 'resnet152', '--world-size', '4096'])\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "At 4096 ranks the fastest step with K-FAC is that of d_kfac with F = " in done.stdout
    assert "it pays if it needs less than 0." in done.stdout
    assert "rates: 64 RTX 2080 Ti" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "predict needs either --from SWEEP"),
        (["--model", "resnet20", "--from", "x"], "predict needs either --from SWEEP"),
        (["--from", "x", "--set", "solver=eigen"], "--local-batch-size and --set have no effect with --from"),
        (["--from", "no-such-sweep"], "no runs of sweep 'no-such-sweep'"),
        (["--model", "resnet20", "--set", "colour=red"], "--set colour=red: write FIELD=VALUE"),
        (["--model", "resnet20", "--set", "strategy=dp_kfac"], "predict shows every strategy"),
        (["--model", "resnet20", "--set", "damping=-1"], "damping"),
        (["--model", "resnet20", "--world-size", "4,x"], "sizes must be whole numbers from 1 to 100000"),
        (["--model", "resnet20", "--memory-gib", "0"], "--memory-gib=0 must be a number of GiB > 0"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["predict", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
