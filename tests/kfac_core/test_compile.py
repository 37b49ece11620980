"""Promise: a model compiled by torch.compile gets the gradients of the uncompiled model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from kfac_core import KFAC, KFACConfig
from tests.kfac_core.runs import LR, assert_same, build, data, train

pytestmark = pytest.mark.slow  # the compiler takes seconds a model
OPTIONS = {"damping": 0.01, "factor_update_steps": 2, "inverse_update_steps": 4}


@pytest.mark.parametrize(("backend", "passed"), [("eager", "compiled"), ("aot_eager", "bare")])
def test_compiled_models_take_the_same_steps(backend, passed):
    torch._dynamo.reset()
    want_model = build("mlp")
    want_kfac = KFAC(want_model, KFACConfig.sc20(**OPTIONS), lr=LR)
    want = train(want_model, want_kfac, "mlp", range(12))
    bare = build("mlp")
    model = torch.compile(bare, backend=backend)
    kfac = KFAC(model if passed == "compiled" else bare, KFACConfig.sc20(**OPTIONS), lr=LR)
    assert kfac.shapes == want_kfac.shapes
    for got, expected in zip(train(model, kfac, "mlp", range(12)), want, strict=True):
        assert_same({name.removeprefix("_orig_mod."): g for name, g in got.items()}, expected, 1e-12)
    for key, factor in want_kfac._factors.running.items():
        torch.testing.assert_close(kfac._factors.running[key], factor)
        assert kfac._factors.updates[key] == want_kfac._factors.updates[key] == 6


def test_each_layer_ends_a_graph_and_a_step_without_a_factor_update_runs_no_more_than_that():
    """Counted as they run: a later step compiles nothing, so that new breaks would not tell."""
    torch._dynamo.reset()
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        operations = sum(node.op.startswith("call") for node in graph.graph.nodes)

        def run(*inputs: object) -> object:
            graphs.append(operations)
            return graph.forward(*inputs)

        return run

    model = torch.compile(build("mlp"), backend=backend)
    kfac = KFAC(model, KFACConfig.sc20(factor_update_steps=3, inverse_update_steps=3), lr=LR)
    ran = []
    for step in range(7):
        graphs.clear()
        train(model, kfac, "mlp", [step])
        ran.append([size for size in graphs if size])
    assert ran[1] == ran[2] == ran[4] == ran[5] == [1, 1, 1]  # a graph for each of three layers
    assert len(ran[3]) == len(ran[6]) == 9


def compiled_in_place(model: nn.Sequential) -> nn.Module:
    model.compile(backend="eager")
    return model


def compiled_in_part(model: nn.Sequential) -> nn.Module:
    model[0].compile(backend="eager")
    return model


def compiled_elsewhere(model: nn.Sequential) -> nn.Module:
    return torch.compile(model, backend="eager")


@pytest.mark.parametrize("how", [compiled_in_place, compiled_in_part, compiled_elsewhere])
def test_a_model_compiled_and_run_before_is_captured(how):
    torch._dynamo.reset()
    model = build("mlp")
    runs, (x, y) = how(model), data("mlp", 0)
    functional.cross_entropy(runs(x), y).backward()
    kfac = KFAC(model, KFACConfig.sc20(factor_update_steps=1, inverse_update_steps=1), lr=LR)
    functional.cross_entropy(runs(x), y).backward()
    kfac.step()
    assert [int(count) for count in kfac._factors.updates.values()] == [1] * 6
