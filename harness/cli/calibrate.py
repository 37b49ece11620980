"""`kronscale calibrate`: measures this host for predictions, and stores the result with its environment."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.errors import UserError

if TYPE_CHECKING:
    from harness.cell import Cell


def calibrate(
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the calibration.")],
    world_size: Annotated[
        str, typer.Option(metavar="LIST", help="World sizes to measure on this host: 2,4.")
    ] = "2",
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of calibrations.")] = Path(
        "results/calibrations"
    ),
    file: Annotated[
        Path | None,
        typer.Option(
            "-f",
            "--file",
            metavar="FILE",
            help="Sweep file whose model is measured too, for `predict --model SWEEP`; a calibration "
            "that exists gets it added.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option(help="Replace a calibration of this name.")] = False,
) -> None:
    """Measure matrix products, factors, decompositions, memory and collectives of this host.

    It takes a minute or two, during which nothing else should run. Ranks are processes on this host; they use
    its GPUs if there is one per rank. With a sweep file, one rank also runs its model's own passes: forward,
    backward and factors.
    """
    path = out / f"{name}.json"
    sizes = sorted({_size(part, world_size) for part in world_size.split(",")})
    if not re.fullmatch(r"[a-z0-9_-]+", name):
        raise UserError(f"--name {name}: use lower-case letters, digits, _ and -")
    cell = None if file is None else _measured_cell(file)
    adds = cell is not None and path.exists() and not overwrite
    if path.exists() and not overwrite and cell is None:
        raise UserError(f"{path} exists; choose another --name, or give --overwrite")
    values = _stored(path) if adds else measured(name, sizes)
    if cell is not None:
        if cell.sweep in values.get("models", {}):
            raise UserError(
                f"{path} has the model of {cell.sweep}; choose another --name, or give --overwrite"
            )
        values.setdefault("models", {})[cell.sweep] = _measured_model(cell)
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1) + "\n")
    typer.echo(str(path))
    if cell is not None:
        typer.echo(f"now: kronscale predict --model {cell.sweep} --calibration {path}")
    if adds:
        return
    typer.echo(
        "To balance layers over ranks by these measured costs instead of n^3, write in a sweep:", err=True
    )
    for solver, costs_text in placing_costs(values).items():
        typer.echo(f"  kfac: {{costs: {costs_text}}}   # solver {solver}", err=True)


def _measured_cell(file: Path) -> Cell:
    """The sweep's first cell with K-FAC, or its first.

    Raises:
        UserError: the file has a mistake, or cells of several workloads.
    """
    from harness.study.sweep import read_sweep  # noqa: PLC0415  slow to load

    cells = read_sweep(file).cells
    workloads = {repr(cell.workload) for cell in cells}
    if len(workloads) > 1:
        raise UserError(f"{file}: has {len(workloads)} workloads, and a calibration measures one; split it")
    return next((cell for cell in cells if cell.kfac is not None), cells[0])


def _measured_model(cell: Cell) -> dict[str, Any]:
    import torch  # noqa: PLC0415  slow to load

    from harness.calibrate_model import measure_model  # noqa: PLC0415

    torch.set_num_threads(1)
    return measure_model(cell, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def _stored(path: Path) -> dict[str, Any]:
    """The content of a calibration, checked.

    Raises:
        UserError: it is not one.
    """
    from analysis.cost_model.calibration_file import read_calibration  # noqa: PLC0415  see measured
    from analysis.cost_model.errors import CostModelError  # noqa: PLC0415

    try:
        read_calibration(str(path))
    except CostModelError as error:
        raise UserError(str(error)) from None
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def placing_costs(values: dict[str, Any]) -> dict[str, str]:
    """`KFACConfig.costs` by solver, in the syntax of a sweep file."""
    import yaml  # noqa: PLC0415  see measured

    from harness.calibrate import costs  # noqa: PLC0415  see measured

    found = {kind: asdict(costs(curve["points"])) for kind, curve in values["inverse"].items()}
    return {
        kind: yaml.safe_dump(one, default_flow_style=True, width=math.inf).strip()
        for kind, one in found.items()
    }


def measured(name: str, world_sizes: list[int]) -> dict[str, Any]:
    """Measure this host; the result is the content of a calibration file."""
    import torch  # noqa: PLC0415  slow to load

    from harness.calibrate import measure_links  # noqa: PLC0415
    from harness.training.environment import read_environment  # noqa: PLC0415

    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Up to the traffic of a model of hundreds of megabytes; less on CPUs, whose links are slower
    largest = 2**28 if device.type == "cuda" else 2**24
    nccl = torch.cuda.device_count() >= max(world_sizes)
    algorithm = "nccl" if nccl else "gloo"
    # Plain Gloo stands for links between hosts; inside a host ranks read each other's memory.
    measured_links = {
        where: links(
            measure_links(world_sizes, [2**12, 2**16, 2**20, largest], single_copy=where == "inside"),
            algorithm,
        )
        for where in (["between"] if nccl else ["between", "inside"])
    }
    environment = read_environment(device, algorithm, ())
    return {
        "schema": 1,
        "name": name,
        "source": "kronscale calibrate",
        "environment": environment.to_json(),
        "largest_world_size": max(world_sizes),
        "algorithm": algorithm,
        "links": measured_links,
        "ranks_per_node": None if nccl else max(world_sizes),
        **compute(device),
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory if nccl else None,
    }


def compute(device: Any) -> dict[str, Any]:
    """Compute rates of one rank, as curves of the calibration file."""
    from harness import calibrate as bench  # noqa: PLC0415  see measured

    return {
        "gemm": {"points": bench.gemm_points(device)},
        "factor": {"points": bench.factor_points(device)},
        "training": {"points": bench.training_points(device)},
        "inverse": {
            kind: {"points": bench.decomposition_points(device, kind)} for kind in ("eigen", "inverse")
        },
        "bytes_per_second": bench.memory_rate(device),
    }


def links(rows: list[tuple[str, int, int, float]], algorithm: str) -> dict[str, Any]:
    """Fitted constants of each operation, as in the calibration file."""
    from analysis.cost_model.fitting import Sample, fit_link  # noqa: PLC0415  see measured

    samples = [Sample(operation, ranks, size, seconds) for operation, ranks, size, seconds in rows]  # type: ignore[arg-type]
    found: dict[str, Any] = {}
    for operation in dict.fromkeys(sample.operation for sample in samples):
        fitted = asdict(fit_link([s for s in samples if s.operation == operation], algorithm))
        found[operation] = {key: value for key, value in fitted.items() if key != "operation"}
    return found


def _size(part: str, whole: str) -> int:
    if not part.strip().isdigit() or int(part) < 2:
        raise UserError(
            f"--world-size {whole}: use whole numbers >= 2, got {part!r}; one rank does not communicate"
        )
    return int(part)
