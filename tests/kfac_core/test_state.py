"""Promise: a saved K-FAC goes on bitwise, also elsewhere, and its memory is what it says."""

from __future__ import annotations

import io
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from kfac_core import KFAC, ConfigError, KFACConfig
from kfac_core.grams import Gram, Rows
from kfac_core.packing import Packed
from kfac_core.placement import placement
from kfac_core.schedule import Milestones
from kfac_core.state import merge_shards
from tests.kfac_core.dense import solve
from tests.kfac_core.runs import LR, assert_same, build, data, train
from tests.kfac_core.test_guards import backward, stepped

INTERVALS = {"damping": 0.01, "factor_update_steps": 2, "inverse_update_steps": 4}


def start(options: dict[str, Any], saved: bytes | None = None) -> tuple[nn.Module, KFAC]:
    model = build("mlp")
    kfac = KFAC(model, KFACConfig.sc20(**{**INTERVALS, **options}), lr=LR)
    if saved is not None:
        of_model, of_kfac = torch.load(io.BytesIO(saved), weights_only=True)
        model.load_state_dict(of_model)
        kfac.load_state_dict(of_kfac)
    return model, kfac


def save(model: nn.Module, kfac: KFAC) -> bytes:
    file = io.BytesIO()
    torch.save((model.state_dict(), kfac.state_dict()), file)
    return file.getvalue()


def go(
    rank: int, world_size: int, options: dict[str, Any], first: int, last: int, saved: bytes | None
) -> tuple[bytes, dict[str, Tensor]]:
    """Train from step `first` up to `last`; a checkpoint and the parameters."""
    model, kfac = start(options, saved)
    train(model, kfac, "mlp", range(first, last), rank, world_size)
    return save(model, kfac), dict(model.state_dict())


def stop_and_go_on(
    rank: int, world_size: int, options: dict[str, Any], stops: list[int], last: int
) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The parameters of a whole run, and of those that go on from each stop with what rank 0 saved there."""
    _, whole = go(rank, world_size, options, 0, last, None)
    model, kfac = start(options)
    saved: list[Any] = []
    for first, stop in pairwise([0, *stops]):
        train(model, kfac, "mlp", range(first, stop), rank, world_size)
        saved.append(save(model, kfac))
    if world_size > 1:
        dist.broadcast_object_list(saved)
    resumed = [go(rank, world_size, options, stop, last, at) for stop, at in zip(stops, saved, strict=True)]
    return whole, [parameters for _, parameters in resumed]


def hybrid(strategy: str) -> dict[str, Any]:
    fraction = {"grad_worker_fraction": 0.5} if strategy == "hybrid_opt" else {}
    return {"strategy": strategy, **fraction}


STOPS = [10, 11, 12]  # in the middle of E, of F and E, on both


def assert_the_same_bits(results: list[tuple[dict[str, Tensor], list[dict[str, Tensor]]]]) -> None:
    for want, at_stops in results:
        assert len(at_stops) == len(STOPS)
        for resumed in at_stops:
            assert_same(resumed, want, 0)


@pytest.mark.parametrize("options", [{}, {"solver": "inverse"}, {"eigen_start": "warm"}])
def test_going_on_from_a_checkpoint_gives_the_same_bits(options):
    assert_the_same_bits([stop_and_go_on(0, 1, options, STOPS, 20)])


@pytest.mark.parametrize(
    ("world_size", "strategy", "solver"),
    [
        (2, "comm_opt", "inverse_pi"), (2, "mem_opt", "eigen"), (4, "hybrid_opt", "eigen"),
        (4, "mem_opt", "inverse_pi"), (2, "dp_kfac", "inverse_pi"), (2, "d_kfac", "eigen"),
    ],
)  # fmt: skip
def test_it_does_so_on_ranks(world, world_size, strategy, solver):
    options = {**hybrid(strategy), "solver": solver}
    assert_the_same_bits(world(world_size).run(stop_and_go_on, options, STOPS, 20))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, "comm_opt"), (2, "comm_opt")),
        ((4, "hybrid_opt"), (2, "mem_opt")),
        ((1, "d_kfac"), (4, "hybrid_opt")),
        ((4, "spd_kfac"), (1, "mpd_kfac")),
    ],
)
def test_a_checkpoint_goes_on_elsewhere_as_if_it_had_always_been_there(world, before, after):
    (size_before, strategy_before), (size_after, strategy_after) = before, after
    halfway = world(size_before).run(go, hybrid(strategy_before), 0, 11, None)
    ((_, want), *_) = world(size_after).run(go, hybrid(strategy_after), 0, 20, None)
    for _, got in world(size_after).run(go, hybrid(strategy_after), 11, 20, halfway[0][0]):
        assert_same(got, want, 1e-6)


def test_every_rank_saves_the_same_state(world):
    first, *others = world(4).run(state_after, hybrid("mem_opt"), 3)
    for other in others:
        assert other["updates"] == first["updates"]
        for kind in ("factors", "second_order"):
            assert_same(other[kind], first[kind], 0)


def state_after(rank: int, world_size: int, options: dict[str, Any], steps: int) -> dict[str, Any]:
    model, kfac = start(options)
    train(model, kfac, "mlp", range(steps), rank, world_size)
    return kfac.state_dict()


@pytest.mark.parametrize(
    ("old", "new", "way"),
    [
        ({"solver": "eigen"}, {"solver": "inverse"}, "state_dict"),
        ({"solver": "inverse"}, {"solver": "inverse", "damping": 0.3}, "state_shard"),
        ({"solver": "inverse_pi"}, {"solver": "inverse_pi", "damping": 0.3}, "merge_shards"),
        ({"solver": "inverse_pi"}, {"solver": "inverse_pi", "damping": 0.3}, "state_dict"),
        (
            {"solver": "inverse"},
            {"solver": "inverse", "damping": None, "relative_damping": 0.01},
            "state_dict",
        ),
        ({"solver": "eigen"}, {"solver": "eigen", "damping": None, "relative_damping": 0.01}, "merge_shards"),
    ],
)
def test_data_of_another_solver_or_damping_are_solved_again_from_the_saved_factors(old, new, way):
    """In the middle of both intervals, the first step already equals the dense solve of what was saved."""
    old_model, old_kfac = start(old)
    train(old_model, old_kfac, "mlp", range(5))
    model, kfac = start({**new, "kl_clip": None})
    model.load_state_dict(old_model.state_dict())
    if way == "state_shard":
        kfac.load_state_shard(old_kfac.state_shard())
    else:
        whole = old_kfac.state_dict() if way == "state_dict" else merge_shards([old_kfac.state_shard()])
        kfac.load_state_dict(whole)
    (got,) = train(model, kfac, "mlp", [5])
    plain = build("mlp")
    plain.load_state_dict(old_model.state_dict())
    x, y = data("mlp", 5)
    functional.cross_entropy(plain(x), y).backward()
    factors = old_kfac.state_dict()["factors"]
    for name in ("0", "2", "4"):
        layer = plain.get_submodule(name)
        gradient = torch.cat([layer.weight.grad, layer.bias.grad[:, None]], 1)
        a, g = factors[f"{name}.a"][0], factors[f"{name}.g"][0]
        means = (float(a.diagonal().mean()), float(g.diagonal().mean()))
        damping = new.get("damping", INTERVALS["damping"]) or new["relative_damping"]
        relative = "relative_damping" in new
        want = solve(new["solver"], damping, a, g, gradient, means, relative)
        expected = {"w": want[:, :-1], "b": want[:, -1]}
        assert_same({"w": got[f"{name}.weight"], "b": got[f"{name}.bias"]}, expected, 1e-8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update(version=3), "state of version 3; this one reads 1 and 2"),
        (
            lambda s: s["factors"].update({"0.a": torch.eye(3)[None]}),
            r"0\.a is saved as \[1, 3, 3\].*\[1, 5, 5\]",
        ),
        (lambda s: s.clear(), "state of version None"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_taken_of_it(change, message):
    model, kfac = start({})
    train(model, kfac, "mlp", range(3))
    state = kfac.state_dict()
    change(state)
    _, fresh = start({})
    with pytest.raises(ConfigError, match=message):
        fresh.load_state_dict(state)
    assert fresh.steps == 0
    assert torch.equal(fresh._factors.running[0, "g"][0], torch.eye(6, dtype=torch.float64))


def held_by(gram: Gram | Packed) -> Tensor:
    match gram:
        case Rows(rows=held) | Packed(triangle=held):
            return held
        case _:
            return gram


def measured(
    rank: int, world_size: int, options: dict[str, Any], largest_whole: int
) -> tuple[list[dict[str, int]], dict[str, int]]:
    """What `memory` says of every rank, and the bytes of this rank's tensors after a forward and backward."""
    usual, placement.LARGEST_UNPACKED = placement.LARGEST_UNPACKED, largest_whole
    model, kfac = start(options)
    train(model, kfac, "mlp", range(2), rank, world_size)
    kfac._capture.clear()
    model(torch.randn(3, 4).double()).square().mean().backward()
    grams = [share.gram for s in kfac._capture.statistics for share in s.shares() or ()]
    sums = [held_by(gram) for gram in grams]
    held = {
        "factors": list(kfac._factors.running.values()),
        "second_order": [kfac._second_order._buffer],
        "gradients": [kfac._gradients._raw, kfac._gradients._preconditioned],
        "statistics": sums,
    }
    sizes = {kind: sum(t.numel() * t.element_size() for t in tensors) for kind, tensors in held.items()}
    said = [kfac.memory(other) for other in range(world_size)]
    placement.LARGEST_UNPACKED = usual
    return said, sizes


@pytest.mark.parametrize(
    ("strategy", "world_size", "largest_whole"),
    [
        ("comm_opt", 1, 320), ("comm_opt", 4, 0), ("mem_opt", 2, 0), ("mem_opt", 4, 320),
        ("hybrid_opt", 3, 320), ("hybrid_opt", 4, 0), ("dp_kfac", 4, 320), ("mpd_kfac", 4, 0),
        ("d_kfac", 2, 320), ("d_kfac", 4, 0), ("spd_kfac", 3, 0),
    ],
)  # fmt: skip
def test_memory_is_that_of_the_tensors_on_every_rank(world, world_size, strategy, largest_whole):
    options = {"strategy": strategy, "solver": ("eigen", "inverse")[world_size % 2]}
    if strategy == "hybrid_opt":
        options["grad_worker_fraction"] = 1 / world_size if world_size % 2 else 0.5
    if world_size == 2:
        options |= {"factor_dtype": "float32", "inverse_dtype": "bfloat16"}
    results = world(world_size).run(measured, options, largest_whole)
    for rank, (_, sizes) in enumerate(results):
        assert all(said[rank] == sizes for said, _ in results)


def test_mem_opt_shards_its_state(world):
    _, alone = measured(0, 1, {"strategy": "mem_opt"}, 320)
    shards = [sizes for _, sizes in world(3).run(measured, {"strategy": "mem_opt"}, 320)]
    for kind in ("factors", "second_order"):
        assert sum(sizes[kind] for sizes in shards) == alone[kind]


def test_a_state_that_waits_for_its_solver_says_so_wherever_it_goes():
    eigen, kfac = start({"solver": "eigen"})
    train(eigen, kfac, "mlp", range(6))
    first = save(eigen, kfac)
    _, between = start({"solver": "inverse"}, first)
    third, last = start({"solver": "inverse"})
    last.load_state_dict(between.state_dict())
    want_model, want = start({"solver": "inverse"}, first)
    third.load_state_dict(want_model.state_dict())
    (got,), (expected,) = (train(*pair, "mlp", range(6, 7)) for pair in ((third, last), (want_model, want)))
    assert_same(got, expected, 0)
    assert all(gradient.abs().max() > 0 for gradient in got.values())


def test_a_warm_basis_that_was_never_solved_is_not_gone_on_from():
    options = {"eigen_start": "warm", "inverse_update_steps": 4}
    whole_model, whole = start(options)
    saved = save(whole_model, whole)
    model, kfac = start(options, saved)
    (got,), (want,) = (train(*pair, "mlp", range(1)) for pair in ((model, kfac), (whole_model, whole)))
    assert_same(got, want, 0)


def test_a_state_of_the_version_before_is_read():
    model, kfac = start({})
    train(model, kfac, "mlp", range(5))
    state = kfac.state_dict()
    added = ("must_solve", "owes_factors", "solved")
    older = {key: value for key, value in state.items() if key not in added}
    other_model, other = start({})
    other_model.load_state_dict(model.state_dict())
    other.load_state_dict({**older, "version": 1})
    (got,), (want,) = (train(*pair, "mlp", range(5, 6)) for pair in ((other_model, other), (model, kfac)))
    assert_same(got, want, 0)


@pytest.mark.parametrize("options", [{"solver": "eigen"}, {"solver": "inverse"}])
def test_the_same_schedule_of_the_damping_solves_nothing_again(options):
    """At step 6 the damping is another than at step 4, when the data were solved."""
    options = {**options, "damping": Milestones(initial=0.01, factor=0.5, at=(2, 5), unit="steps")}
    model, kfac = start(options)
    train(model, kfac, "mlp", range(6))
    _, other = start(options)
    other.load_state_dict(kfac.state_dict())
    assert not other._must_solve


class Headed(nn.Module):
    """A trunk, and a head of any number of classes."""

    def __init__(self, classes: int, name: str = "head") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh())
        self.add_module(name, nn.Linear(5, classes))
        self._name = name

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self._name)(self.trunk(x))


def fine_tuned(options: dict[str, Any]) -> tuple[KFAC, Headed, KFAC]:
    """A trained K-FAC, and the model and K-FAC of another task."""
    model, other = Headed(3), Headed(7, "classes")
    kfac = KFAC(model, KFACConfig.sc20(factor_update_steps=1, inverse_update_steps=1, **options), lr=LR)
    stepped(model, kfac, 4)
    return (
        kfac,
        other,
        KFAC(other, KFACConfig.sc20(factor_update_steps=1, inverse_update_steps=1, **options), lr=LR),
    )


@pytest.mark.parametrize("options", [{"solver": "inverse"}, {"eigen_start": "warm"}])
def test_a_state_of_partly_other_layers_loads_what_matches_and_says_what_does_not(options):
    kfac, model, other = fine_tuned(options)
    found = other.load_state_dict(kfac.state_dict(), strict=False)
    assert found.missing_keys == ["classes.a", "classes.g"]
    assert found.unexpected_keys == ["head.a", "head.g"]
    assert found.mismatched_keys == []
    names = [shape.name for shape in other.shapes]
    for (layer, kind), factor in other._factors.running.items():
        want = (
            kfac._factors.running[layer, kind]
            if names[layer] != "classes"
            else torch.eye(len(factor[0]))[None]
        )
        assert torch.equal(factor, want)
    assert other.steps == 4
    assert stepped(model, other) == []


def test_a_state_of_other_layers_is_refused_with_all_their_names():
    kfac, _, other = fine_tuned({})
    with pytest.raises(ConfigError) as error:
        other.load_state_dict(kfac.state_dict())
    assert "missing classes.a, classes.g; unexpected head.a, head.g; strict=False loads" in str(error.value)
    assert other.steps == 0


def test_factors_of_another_shape_stay_as_they_are():
    kfac, _, _ = fine_tuned({})
    other = KFAC(Headed(7), KFACConfig.sc20(), lr=LR)
    found = other.load_state_dict(kfac.state_dict(), strict=False)
    assert found == ([], [], ["head.g"])
    keys = other._snapshot().keys()
    assert torch.equal(other._factors.running[keys["head.g"]][0], torch.eye(7))
    assert torch.equal(other._factors.running[keys["head.a"]], kfac._factors.running[keys["head.a"]])


def test_a_state_that_matches_loads_the_same_without_being_strict():
    model, kfac = start({})
    train(model, kfac, "mlp", [0])
    _, other = start({})
    assert other.load_state_dict(kfac.state_dict(), strict=False) == ([], [], [])
    assert not other._must_solve


def loaded_in_part(rank: int, world_size: int, strategy: str) -> list[Tensor]:
    """Gradients of the step after a state of another head was loaded."""
    kfac, model, other = fine_tuned({"strategy": strategy})
    other.load_state_dict(kfac.state_dict(), strict=False)
    backward(model)
    other.step()
    return [parameter.grad.clone() for parameter in model.parameters()]


def test_every_rank_loads_its_part_of_what_matches(world):
    want = loaded_in_part(0, 1, "comm_opt")
    for got in world(2).run(loaded_in_part, "mem_opt"):
        for one, two in zip(got, want, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_a_state_that_is_no_mapping_is_refused():
    with pytest.raises(ConfigError, match="a K-FAC state must be a mapping, got a"):
        KFAC(build("mlp"), lr=LR).load_state_dict([1])
