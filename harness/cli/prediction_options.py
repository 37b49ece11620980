"""Options of `predict`: model, ranks and K-FAC's settings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from harness.errors import UserError

if TYPE_CHECKING:
    from analysis.cost_model.calibration import Calibration
    from analysis.cost_model.models import Model
    from kfac_core.config import KFACConfig

MOST_RANKS = 100_000  # as in a sweep, see harness.cell
MOST_EXAMPLES = 2**31
_MOST_GIB = 2**20
MODEL_HELP = "Model: resnet50, bert_large, ..., or the sweep that calibrate measured."
FROM_HELP = "Sweep with completed runs of small worlds: its name, folder or archive."
CALIBRATION_HELP = (
    "Calibration: a name in results/calibrations, or a path. Default: spd_kfac_64, or with --from links that "
    "are fitted to the study's own exchanges."
)
LINKS_HELP = "Calibration with the links. Default: fitted to the study's own exchanges."
SIZES_HELP = "World sizes: 64,4096. Default: up to 4,096, or with --from up to 8 times the largest measured."
SET_HELP = "Set a field of K-FAC: solver=inverse, inverse_update_steps=500."


def memory_bytes(gib: float) -> int:
    """The memory of a rank that `--memory-gib` gives.

    Raises:
        UserError: it is not positive, or larger than any rank's.
    """
    if not 0 < gib <= _MOST_GIB:  # also of NaN
        raise UserError(f"--memory-gib={gib:g} must be a number of GiB > 0 and <= {_MOST_GIB}")
    return round(gib * 2**30)


def model_named(name: str, machine: Calibration | None = None) -> Model:
    """Layer shapes of a model: one that the calibration measured, or one of the papers.

    Raises:
        UserError: there is no model of this name.
    """
    from analysis.cost_model.errors import CostModelError  # noqa: PLC0415  slow to load
    from analysis.cost_model.models import read_model  # noqa: PLC0415

    tables = {} if machine is None else machine.tables
    if name in tables:
        return tables[name]
    try:
        return read_model(name)
    except CostModelError as error:
        also = f"; calibration {machine.name} has {', '.join(sorted(tables))}" if machine and tables else ""
        raise UserError(f"--model: {error}{also}") from None


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
        if name == "strategy":
            raise UserError(f"--set {pair}: predict shows every strategy")
        values[name] = read_value(value, f"--set {name}", UserError)
    return values


def configured(strategy: str, world_size: int, values: dict[str, Any]) -> KFACConfig:
    """Configuration of K-FAC with this strategy, checked for the world size.

    Raises:
        UserError: a value is of another type or out of range.
        PlacementError: the strategy does not support this world size.
    """
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415

    from harness.yaml_files.validation_messages import explain  # noqa: PLC0415
    from kfac_core.config import KFACConfig  # noqa: PLC0415  see model_named
    from kfac_core.placement.strategies import check_world_size  # noqa: PLC0415

    try:  # as a sweep's section is read: as JSON, where a list may become a tuple
        text = json.dumps({**values, "strategy": strategy})
        config: KFACConfig = TypeAdapter(KFACConfig).validate_json(text, strict=True)
    except ValidationError as error:
        place, sentence = explain(error)
        raise UserError(f"--set {place[0] if place else ''}{sentence}") from None
    check_world_size(config, world_size)
    return config


def whole_number(text: str) -> int | None:
    """A whole number of up to nine digits, or None: others are no size of anything here."""
    stripped = text.strip()
    return int(stripped) if stripped.isascii() and stripped.isdecimal() and len(stripped) < 10 else None
