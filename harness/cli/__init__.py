"""The command line: parses, calls, prints. Commands import what they need when they run, so help is fast."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

import typer

from harness.cli import (
    archive,
    blocks,
    calibrate,
    choose,
    compare,
    data,
    doctor,
    export,
    init,
    operate,
    plan,
    predict,
    recommend,
    report,
    reproduce,
)
from harness.cli.command import Command
from harness.cli.error_messages import USAGE, message_of, print_error
from harness.cli.sweep_statuses import INTERRUPTED
from harness.errors import BudgetError, UserError
from kfac_core.errors import ConfigError, PlacementError

OVER_BUDGET = 4

# Newer versions of typer contain their own click, which does not export the parent of its usage errors.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]

app = typer.Typer(
    name="kronscale",
    help="Scaling studies of distributed K-FAC training.",
    epilog="Example: kronscale plan -f jobs/sweeps/demo.yaml",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command, _example in (
    (init.init, "init my-study"),
    (plan.plan, "plan -f jobs/sweeps/demo.yaml --where 'world_size>=2'"),
    (operate.submit, "submit -f jobs/sweeps/demo.yaml"),
    (operate.run, "run -f jobs/sweeps/demo.yaml --where seed=0"),
    (operate.status, "status demo --where 'world_size>=2'"),
    (operate.logs, "logs sgd-p2-s0 --rank 1"),
    (operate.cancel, "cancel demo --where method=sgd"),
    (operate.retry, "retry demo"),
    (doctor.doctor, "doctor --site slurm-test --runs results/runs"),
    (report.report, "report demo --out results/figures/demo"),
    (choose.choose, "choose -f jobs/sweeps/headline/tuning.yaml"),
    (blocks.blocks, "blocks -f jobs/sweeps/headline/tuning.yaml --into results/headline"),
    (archive.archive, "archive demo --out demo.tar.xz"),
    (compare.compare, "compare results/old/demo results/runs/demo"),
    (reproduce.reproduce, "reproduce sc20 --size small"),
    (predict.predict, "predict --model resnet152 --world-size 64,4096 --memory-gib 16"),
    (recommend.recommend, "recommend demo --world-size 64"),
    (calibrate.calibrate, "calibrate --name node17 --world-size 2,4"),
    (export.export, "export mllog demo --where 'method=sgd' --out sgd.log"),
):
    app.command(cls=Command, epilog=f"Example: kronscale {_example}")(_command)
app.add_typer(data.commands, name="data")


@cache
def command_line() -> Any:
    """All commands with their options. typer takes a tenth of a second to build them: once a process."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; a user's mistake is one line on standard error, a traceback is a bug.

    Returns:
        Exit code: 0 ok, 1 runs failed, 2 usage or config, 3 regression, 4 over budget, 130 interrupted.
    """
    try:
        code = command_line()(arguments, prog_name="kronscale", standalone_mode=False)
    except BudgetError as error:
        print_error(str(error))
        return OVER_BUDGET
    except (UserError, ConfigError, PlacementError) as error:
        return print_error(str(error))
    except _UsageError as error:
        message: str = error.format_message()  # type: ignore[attr-defined]  # see _UsageError
        if "Missing option '--file'" in message:  # often the file is there, without its -f
            message = f"{message.rstrip('.')}; a sweep file is given as -f FILE"
        return print_error(message)
    except OSError as error:  # a missing folder, missing permissions or a full disk: not a bug
        return print_error(message_of(error))
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    return code if isinstance(code, int) else 0


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version  # noqa: PLC0415  only needed here

        typer.echo(f"kronscale {version('kronscale')}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(USAGE)
