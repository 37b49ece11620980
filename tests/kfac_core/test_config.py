"""Promise: every hyperparameter that no run could use is refused at construction, with value and range."""

import pytest

from kfac_core import ConfigError, KFACConfig
from kfac_core.config import Costs

TWO = [[64, 1e-4], [576, 1e-2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "comm_op"}, "strategy='comm_op' is not one of .*did you mean comm_opt"),
        ({"solver": "cholesky"}, "solver='cholesky' is not one of eigen, inverse, inverse_pi"),
        ({"assignment": "random"}, "assignment='random' is not one of"),
        ({"strategy": "hybrid_opt"}, "needs grad_worker_fraction"),
        ({"strategy": "hybrid_opt", "grad_worker_fraction": 0.0}, r"grad_worker_fraction=0.0 .*\(0, 1\]"),
        ({"grad_worker_fraction": 0.5}, "has no meaning for strategy=comm_opt"),
        ({"damping": 0.0}, r"damping=0.0 lies outside \(0, inf\)"),
        ({"damping": float("nan")}, "damping=nan"),
        ({"factor_decay": 1.0}, r"factor_decay=1.0 lies outside \[0, 1\)"),
        ({"kl_clip": -1.0}, "kl_clip=-1.0"),
        ({"factor_update_steps": 0}, "factor_update_steps=0 must be a whole number of steps >= 1"),
        ({"inverse_update_steps": True}, "inverse_update_steps=True"),
        ({"factor_update_steps": 10, "inverse_update_steps": 5}, "is below factor_update_steps=10"),
        ({"split_factors": "never", "strategy": "mem_opt"}, "has no meaning for strategy=mem_opt"),
        ({"factor_dtype": "int8"}, "factor_dtype='int8' is not one of float64"),
        ({"sequence": "sum"}, "sequence='sum' is not one of expand, reduce"),
        ({"loss_reduction": "none"}, "loss_reduction='none'"),
        ({"factor_start": "zero"}, "factor_start='zero'"),
        ({"skip": "fc"}, r"skip='fc' is one text; write a tuple of patterns: \('fc',\)"),
        ({"damping": "0.1"}, "damping='0.1' must be a number, a schedule or a function of the step"),
        ({"damping": None}, "damping=None must be a number"),
        ({"kl_clip": "1"}, "kl_clip='1' must be a number"),
        ({"factor_decay": True}, "factor_decay=True must be a number"),
        ({"factor_batch_fraction": "1"}, "factor_batch_fraction='1' must be a number$"),
        ({"skip": ("[",)}, r"skip pattern '\[' must be a regular expression: "),
        ({"costs": {}}, r"costs=\{\} must be a mapping of inverse_seconds to pairs of a size and seconds"),
        ({"costs": 5}, "costs=5 must be a mapping of inverse_seconds"),
        ({"costs": {"inverse_seconds": TWO, "links": 1}}, r"costs=\{.*'links': 1\} must be a mapping of"),
        ({"costs": {"inverse_seconds": TWO[:1]}}, "two or more, each size once"),
        ({"costs": {"inverse_seconds": [[64, 1e-4], [8, 0]]}}, r"are not pairs of a size and seconds"),
        ({"costs": {"inverse_seconds": [[64, 1e-4], [1.5, 1e-5]]}}, r"are not pairs of a size and seconds"),
        ({"costs": {"inverse_seconds": [*TWO, [64, 2e-4]]}}, "two or more, each size once"),
        ({"costs": {"inverse_seconds": 3}}, "inverse_seconds=3 are not pairs of a size and seconds"),
    ],
)
def test_bad_values_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        KFACConfig(**options)


def test_the_limits_themselves_are_allowed():
    KFACConfig(strategy="hybrid_opt", grad_worker_fraction=1.0, factor_decay=0.0, kl_clip=None)


def test_costs_are_taken_as_a_file_holds_them_and_can_be_a_key():
    config = KFACConfig(costs={"inverse_seconds": TWO[::-1]})
    assert config.costs == Costs(inverse_seconds=((64, 1e-4), (576, 1e-2)))
    assert {config: 1}[KFACConfig(costs=config.costs)] == 1
