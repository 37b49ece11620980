"""What the verbs about worlds that do not exist are asked: a model, a world, and K-FAC's settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.errors import UserError
from kfac_core.config import KFACConfig, nearest
from kfac_core.placement.strategies import check_world_size

if TYPE_CHECKING:
    from analysis.cost_model.models import Model

MODEL_HELP = "Its table: resnet50, bert_large, ..."
SET_HELP = "K-FAC's settings: solver=inverse, inverse_update_steps=500."


def model_named(name: str) -> Model:
    """The table of a model.

    Raises:
        UserError: there is none of this name.
    """
    from analysis.cost_model.errors import CostModelError  # noqa: PLC0415  --help does not wait for it
    from analysis.cost_model.models import read_model  # noqa: PLC0415

    try:
        return read_model(name)
    except CostModelError as error:
        raise UserError(f"--model: {error}") from None


def settings(pairs: Sequence[str]) -> dict[str, Any]:
    """`FIELD=VALUE` as K-FAC's hyperparameters.

    Raises:
        UserError: no such field, or no pair.
    """
    import yaml  # noqa: PLC0415  see model_named

    fields = tuple(KFACConfig.__dataclass_fields__)
    values: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or name not in fields:
            hint = nearest(name, fields)
            raise UserError(f"--set {pair}: {name!r} is no setting of K-FAC{hint}; say FIELD=VALUE")
        values[name] = yaml.safe_load(value)
    return values


def configured(strategy: str, world_size: int, values: dict[str, Any]) -> KFACConfig:
    """K-FAC with this strategy, refused where it cannot divide the world.

    Raises:
        ConfigError: a value is out of range.
        PlacementError: the strategy cannot divide the world.
    """
    config = KFACConfig(**{**values, "strategy": strategy})
    check_world_size(config, world_size)
    return config


def ranks_listed(text: str, world_size: int) -> list[int]:
    """`0,17,max` as ranks.

    Raises:
        UserError: a part is no rank of the world.
    """
    ranks = []
    for part in text.split(","):
        word = part.strip()
        rank = world_size - 1 if word == "max" else int(word) if word.isdigit() else -1
        if not 0 <= rank < world_size:
            allowed = f"a rank in 0 to {world_size - 1}, or max"
            raise UserError(f"--rank {text}: {word!r} is no rank of a world of {world_size}; use {allowed}")
        ranks.append(rank)
    return list(dict.fromkeys(ranks))
