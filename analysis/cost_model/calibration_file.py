"""Reads a calibration's JSON file strictly: typed, finite, in range and in order; else an error of one line.

Prices follow from these numbers alone, so a damaged one must not become a price.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from analysis.cost_model.calibration import FOLDER, SCHEMA, Calibration, Curve, Link
from analysis.cost_model.errors import CostModelError
from analysis.cost_model.laws import ALGORITHMS
from analysis.cost_model.models import Model
from analysis.cost_model.models.stored import StoredModel, stored_layer
from analysis.cost_model.work import Operation
from harness.shipped import find, find_all
from kfac_core.config import nearest
from kfac_core.placement import FactorShape, LayerShape

_MOST_BYTES = 1 << 20
_MOST_SHOWN = 60  # characters of a value in an error message

# No machine has a larger one; the largest of all, multiplied, still make finite seconds.
Seconds = Annotated[float, Field(gt=0, le=1e6)]
Coefficient = Annotated[float, Field(ge=0, le=1e6)]
Size = Annotated[float, Field(gt=0, le=1e24)]
Error = Annotated[float, Field(ge=0, le=10)]
Ranks = Annotated[int, Field(ge=1, le=10**6)]
Count = Annotated[int, Field(ge=1, le=2**63 - 1)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Curve(_Part):
    points: tuple[tuple[Size, Seconds], ...] = ()
    formula: Literal["points", "power", "exponential"] = "points"
    constant: Coefficient = 0.0
    coefficient: Coefficient = 0.0
    power: Annotated[float, Field(gt=0, le=6)] = 1.0
    relative_error: Error = 0.0

    @model_validator(mode="after")
    def _one_law(self) -> Self:
        given = self.model_fields_set - {"relative_error", "formula"}
        if self.formula == "points":
            if not self.points or given - {"points"}:
                raise ValueError("must have points [size, seconds], and nothing else beside relative_error")
            if not all(before < after for (before, _), (after, _) in pairwise(self.points)):
                raise ValueError(
                    f"points must have ascending sizes, each once, got {[n for n, _ in self.points]}"
                )
        elif "points" in given:
            raise ValueError(f"points have no effect with formula={self.formula}")
        elif self.formula == "exponential" and not self.constant:
            raise ValueError("constant must be > 0 with formula=exponential, got 0")
        elif not self.constant and not self.coefficient:
            raise ValueError("constant and coefficient are both 0: everything would take no time")
        elif self.formula == "exponential" and "power" in given:
            raise ValueError("power has no effect with formula=exponential")
        return self


class _Link(_Part):
    world_size: Annotated[int, Field(ge=2, le=10**6)]
    latency_seconds: Annotated[float, Field(ge=0, le=1e6)]
    seconds_per_byte: Annotated[float, Field(ge=0, le=1)]
    relative_error: Error = 0.0


_Dims = tuple[Annotated[int, Field(ge=1, le=10**6)], Annotated[int, Field(ge=1, le=10**8)]]
"""Rows of a factor's blocks, and their number."""


class _Layer(_Part):
    name: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,500}$")]
    a: _Dims
    g: _Dims
    diagonal: Literal["", "a", "g", "ag"] = ""
    positions: Annotated[int, Field(ge=1, le=10**9)] = 1


class _Facts(_Part):
    local_batch_size: Annotated[float, Field(ge=1, le=1e9)]
    forward_backward_seconds: Seconds | None = None
    factor_seconds: Seconds | None = None
    other_parameters: Annotated[int, Field(ge=0, le=10**13)] | None = None
    layers: Annotated[tuple[_Layer, ...], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.layers is None) != (self.other_parameters is None):
            raise ValueError("needs both layers and other_parameters, or neither")
        return self

    def table(self, name: str) -> Model:
        """The measured model."""
        shapes = tuple(
            LayerShape(one.name, FactorShape(*one.a), FactorShape(*one.g), one.diagonal)
            for one in self.layers or ()
        )
        layers = (
            stored_layer(shape, one.positions) for shape, one in zip(shapes, self.layers or (), strict=True)
        )
        return StoredModel(name, tuple(layers), self.other_parameters or 0, stored=shapes)


class _File(_Part):
    name: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{1,200}$")]
    source: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f]{0,1000}$")]
    largest_world_size: Ranks
    algorithm: Literal["gloo", "nccl"]
    links: dict[Literal["between", "inside"], dict[Operation, _Link]]
    gemm: _Curve
    factor: _Curve
    training: _Curve
    inverse: dict[Literal["eigen", "inverse"], _Curve]
    bytes_per_second: Annotated[float, Field(ge=1, le=1e18)]
    memory_bytes: Count | None = None
    ranks_per_node: Ranks | None = None
    models: dict[str, _Facts] = {}
    environment: dict[str, Any] = {}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if "between" not in self.links:
            raise ValueError("links must have `between`, for ranks of different nodes")
        if not all(self.links.values()):
            raise ValueError("links must have an operation of each kind of wire, such as all_reduce")
        if "inside" in self.links and self.ranks_per_node is None:
            raise ValueError("links.inside needs ranks_per_node, the ranks that share them")
        if not self.inverse:
            raise ValueError("inverse must have `eigen` or `inverse`")
        return self


def read_calibration(name: str, folder: Path = FOLDER) -> Calibration:
    """A calibration by its name in `results/calibrations`, or by path.

    Raises:
        CostModelError: it does not exist, or is not a calibration of a version that this code reads.
    """
    path = Path(name) if name.endswith(".json") else find(folder / f"{name}.json")
    try:
        if path.exists() and not path.is_file():  # opening a pipe would wait for its other end
            raise CostModelError(f"{path}: must be a regular file")
        content = path.read_bytes() if path.stat().st_size <= _MOST_BYTES else None
    except FileNotFoundError:
        there = tuple(sorted(found.stem for found in find_all(folder, "*.json")))
        listed = ", ".join(there) or "none"
        raise CostModelError(
            f"no calibration {path}; {folder} has {listed}{nearest(name, there)}; "
            "kronscale calibrate makes one"
        ) from None
    except OSError as error:
        raise CostModelError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise error if isinstance(error, CostModelError) else CostModelError(f"{name!r}: {error}") from None
    if content is None:
        raise CostModelError(f"{path}: has more than {_MOST_BYTES >> 10} KiB, the most that is allowed")
    try:
        values = json.loads(content, object_pairs_hook=_no_key_twice)
    except RecursionError:
        raise CostModelError(f"{path}: not JSON: nested too deep") from None
    except ValueError as error:  # also of text that is not UTF-8, and of numbers of 5,000 digits
        raise CostModelError(f"{path}: not JSON: {str(error)[:_MOST_SHOWN]}") from None
    return parse_calibration(values, str(path))


def parse_calibration(values: Any, where: str) -> Calibration:
    """A calibration from the content of its file.

    Raises:
        CostModelError: it is not one, naming the field, what it has and what is allowed; or it is of another
            version.
    """
    if not isinstance(values, Mapping):
        raise CostModelError(f"{where}: not a calibration: must be a mapping, got {_shown(values)}")
    if type(values.get("schema")) is not int or values["schema"] != SCHEMA:
        raise CostModelError(
            f"{where}: calibration of schema {_shown(values.get('schema'))}; this code reads {SCHEMA}"
        )
    if values.get("algorithm") not in ALGORITHMS:
        raise CostModelError(
            f"{where}: algorithm={_shown(values.get('algorithm'))} is not one of {ALGORITHMS}"
        )
    rest = {name: value for name, value in values.items() if name != "schema"}
    try:  # as JSON, where a list may become a tuple
        file = _File.model_validate_json(json.dumps(rest), strict=True)
    except ValidationError as error:
        raise CostModelError(f"{where}: not a calibration: {_refused(error)}") from None
    except (RecursionError, ValueError, TypeError) as error:  # values that no JSON file holds
        raise CostModelError(f"{where}: not a calibration: {str(error)[:_MOST_SHOWN]}") from None
    return _built(file)


def _built(file: _File) -> Calibration:
    return Calibration(
        name=file.name,
        source=file.source,
        largest_world_size=file.largest_world_size,
        algorithm=file.algorithm,
        links={
            wire: {operation: Link(operation, **link.model_dump()) for operation, link in links.items()}
            for wire, links in file.links.items()
        },
        gemm=_curve(file.gemm),
        factor=_curve(file.factor),
        training=_curve(file.training),
        inverse={solver: _curve(curve) for solver, curve in file.inverse.items()},
        bytes_per_second=file.bytes_per_second,
        memory_bytes=file.memory_bytes,
        ranks_per_node=file.ranks_per_node,
        models={
            model: facts.model_dump(exclude_none=True, exclude={"layers", "other_parameters"})
            for model, facts in file.models.items()
        },
        tables={name: facts.table(name) for name, facts in file.models.items() if facts.layers},
        environment=file.environment,
    )


def _curve(curve: _Curve) -> Curve:
    return Curve(**curve.model_dump())


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {_shown(key)} is given twice")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{key}={value} must be a finite number")
        found[key] = value
    return found


def _refused(error: ValidationError) -> str:
    """`gemm.points[0][1] must be greater than 0, got -1`."""
    first = error.errors(include_url=False)[0]
    parts = (f"[{part}]" if isinstance(part, int) else f".{_plain(part)}" for part in first["loc"])
    field = "".join(parts).removeprefix(".")
    if first["type"] == "missing":
        return f"{field} is missing"
    if first["type"] == "extra_forbidden":
        return f"{field} is not a known key"
    if first["type"] == "value_error":
        return f"{field} {first['ctx']['error']}".lstrip()
    wanted = (
        first["msg"]
        .removeprefix("Input should ")
        .removeprefix("String should ")
        .removeprefix("have ")
        .replace("be a valid", "be a")
    )
    return f"{field} must {wanted}, got {_shown(first['input'])}"


def _shown(value: Any) -> str:
    text = _plain(repr(value))
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _plain(text: str) -> str:
    return " ".join(text.splitlines())[:_MOST_SHOWN]
