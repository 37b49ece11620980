"""`kronscale emulate`: counts of the real K-FAC step on single ranks of any world, and their prediction."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.options import AsJson
from harness.cli.prediction_options import MODEL_HELP, MOST_EXAMPLES, MOST_RANKS, SET_HELP

if TYPE_CHECKING:
    from analysis.cost_model.work import Work
    from harness.emulate import Emulation

DIFFERENT = 1


def emulate(
    model: Annotated[str, typer.Option(metavar="NAME", help=MODEL_HELP)],
    world_size: Annotated[int, typer.Option(metavar="P", min=1, max=MOST_RANKS, help="World size.")],
    rank: Annotated[str, typer.Option(metavar="LIST", help="Ranks to emulate: 0,17,max.")] = "0",
    strategy: Annotated[str, typer.Option(metavar="NAME", help="Distribution strategy.")] = "comm_opt",
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help=SET_HELP)] = None,
    local_batch_size: Annotated[
        int, typer.Option(metavar="N", min=1, max=MOST_EXAMPLES, help="Examples per rank.")
    ] = 1,
    as_json: AsJson = False,
) -> int:
    """Run the K-FAC step of single ranks without the others, and compare its counts with the prediction.

    Exit code 1 if a count of calls, bytes or state differs from the prediction.
    """
    from harness.cli.prediction_options import configured, model_named, ranks_listed, settings  # noqa: PLC0415

    table = model_named(model)
    config = configured(strategy, world_size, settings(set_ or ()))
    ranks = ranks_listed(rank, world_size)
    # imported after the arguments are checked: torch is slow to load
    from analysis.cost_model.work import Setup, Work  # noqa: PLC0415
    from harness.emulate import emulate as run_emulation  # noqa: PLC0415

    work = Work(Setup(table, config, world_size, local_batch_size))
    different = 0
    for seen in run_emulation(
        table.layers, table.other_parameters, config, world_size, ranks, local_batch_size
    ):
        rows = list(_rows(seen, work))
        different += sum(row["counted"] != row["predicted"] for row in rows)
        if as_json:
            head = {"model": model, "strategy": strategy, "world_size": world_size, "rank": seen.rank}
            typer.echo(json.dumps({**head, "counts": rows, "flops": seen.update.flops}))
        else:
            _print(seen, rows)
    return DIFFERENT if different else 0


def _rows(seen: Emulation, work: Work) -> Iterator[dict[str, Any]]:
    for name, step, update in (("update step", seen.update, True), ("plain step", seen.plain, False)):
        predicted = work.traffic(seen.rank, update=update)
        for phase in sorted(step.calls.keys() | set(predicted)):
            calls, sent = predicted.get(phase, (0, 0))  # type: ignore[call-overload]  # Phase is a str
            counted = step.calls.get(phase, 0), step.sent_bytes.get(phase, 0)
            yield {"what": f"{name}, {phase} calls", "counted": counted[0], "predicted": calls}
            yield {"what": f"{name}, {phase} bytes", "counted": counted[1], "predicted": sent}
    for kind, count in seen.state_bytes.items():
        predicted_bytes = work.state_bytes[kind][seen.rank]
        yield {"what": f"state, {kind} bytes", "counted": count, "predicted": predicted_bytes}


def _print(seen: Emulation, rows: list[dict[str, Any]]) -> None:
    from harness.cli.output import console, figure_table  # noqa: PLC0415  see emulate

    title = f"rank {seen.rank} of {seen.world_size}"
    table = figure_table(title, ("what", "counted", "predicted", ""), "what")
    for row in rows:
        mark = "" if row["counted"] == row["predicted"] else "differs"
        table.add_row(row["what"], f"{row['counted']:,}", f"{row['predicted']:,}", mark)
    for phase, flops in seen.update.flops.items():
        table.add_row(f"update step, {phase} FLOPs", f"{flops:,}", "", "")
    console().print(table)
