"""Options of `predict` and `emulate`: model, ranks and K-FAC's settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.errors import UserError

if TYPE_CHECKING:
    from analysis.cost_model.models import Model
    from kfac_core.config import KFACConfig

MODEL_HELP = "Model: resnet50, bert_large, ..."
SET_HELP = "Set a field of K-FAC: solver=inverse, inverse_update_steps=500."


def model_named(name: str) -> Model:
    """Layer shapes of a model.

    Raises:
        UserError: there is no model of this name.
    """
    from analysis.cost_model.errors import CostModelError  # noqa: PLC0415  slow to load
    from analysis.cost_model.models import read_model  # noqa: PLC0415

    try:
        return read_model(name)
    except CostModelError as error:
        raise UserError(f"--model: {error}") from None


def settings(pairs: Sequence[str]) -> dict[str, Any]:
    """Hyperparameters of K-FAC from `FIELD=VALUE`.

    Raises:
        UserError: unknown field, one given twice, or not FIELD=VALUE.
    """
    from harness.yaml_files.document import read_value  # noqa: PLC0415  see model_named
    from kfac_core.config import KFACConfig, nearest  # noqa: PLC0415

    fields = tuple(KFACConfig.__dataclass_fields__)
    values: dict[str, Any] = {}
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign or name not in fields:
            hint = nearest(name, fields)
            raise UserError(f"--set {pair}: {name!r} is not a field of K-FAC{hint}; write FIELD=VALUE")
        if name in values:
            raise UserError(f"--set {pair}: {name} is set a second time; give it once")
        if not value.strip():
            raise UserError(f"--set {pair}: has no value; write null for no value")
        values[name] = read_value(value, f"--set {name}", UserError)
    return values


def configured(strategy: str, world_size: int, values: dict[str, Any]) -> KFACConfig:
    """Configuration of K-FAC with this strategy, checked for the world size.

    Raises:
        ConfigError: a value is out of range.
        PlacementError: the strategy does not support this world size.
    """
    from kfac_core.config import KFACConfig  # noqa: PLC0415  see model_named
    from kfac_core.placement.strategies import check_world_size  # noqa: PLC0415

    config = KFACConfig(**{**values, "strategy": strategy})
    check_world_size(config, world_size)
    return config


def ranks_listed(text: str, world_size: int) -> list[int]:
    """Ranks from `0,17,max`.

    Raises:
        UserError: a part is not a rank of the world.
    """
    ranks = []
    for part in text.split(","):
        word = part.strip()
        rank = world_size - 1 if word == "max" else int(word) if word.isdigit() else -1
        if not 0 <= rank < world_size:
            allowed = f"from 0 to {world_size - 1}, or max"
            raise UserError(f"--rank {text}: ranks of a world of {world_size} are {allowed}, got {word!r}")
        ranks.append(rank)
    return list(dict.fromkeys(ranks))
