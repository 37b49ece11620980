"""The command line: parses, calls, prints.

A command's module is imported when the command is asked for. What reads records (`analysis`, pandas) or looks
at a machine (`doctor`) is imported where it is used, because `--help` and a login node need neither.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

from harness.cli.command import Command
from harness.cli.error_messages import INTERRUPTED, USAGE, message_of, print_error
from harness.errors import BudgetError, UserError
from kfac_core.errors import ConfigError, PlacementError

OVER_BUDGET = 4

# Newer versions of typer contain their own click, which does not export the parent of its usage errors.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class Entry(NamedTuple):
    """A command: where its function is, the line that `kronscale --help` has of it, and an example."""

    module: str
    about: str
    example: str


COMMANDS: Mapping[str, Entry] = {
    "init": Entry("init", "Start a study folder.", "init my-study"),
    "plan": Entry("plan", "Show what a sweep would run.", "plan -f jobs/sweeps/demo.yaml"),
    "submit": Entry("operate", "Submit cells, and return.", "submit -f jobs/sweeps/demo.yaml"),
    "run": Entry("operate", "Submit, and show progress to the end.", "run -f jobs/sweeps/demo.yaml"),
    "status": Entry("operate", "Show the state of stored cells.", "status demo --where 'world_size>=2'"),
    "logs": Entry("operate", "Print a rank's output.", "logs sgd-p2-s0 --rank 1"),
    "cancel": Entry("operate", "End pending and running cells.", "cancel demo --where method=sgd"),
    "retry": Entry("operate", "Start cells again that did not complete.", "retry demo"),
    "report": Entry("report", "Write figures, tables and a page.", "report demo --out results/figures/demo"),
    "compare": Entry("compare", "Compare two studies.", "compare results/old/demo results/runs/demo"),
    "reproduce": Entry("reproduce", "Run a paper, and draw its figures.", "reproduce sc20 --size small"),
    "choose": Entry("choose", "Write the tuned study.", "choose -f jobs/sweeps/headline/tuning.yaml"),
    "archive": Entry("archive", "Pack a study into one file.", "archive demo --out demo.tar.xz"),
    "data": Entry("data", "Check and prepare the files that workloads read.", "data check imagenet"),
    "doctor": Entry("doctor", "Check the machine before the first run.", "doctor --site slurm-test"),
    "predict": Entry("predict", "Predict larger worlds.", "predict --from demo --world-size 16,64"),
    "export": Entry("export", "Write runs for other tools.", "export mllog demo --out sgd.log"),
}


class _Loaded(Mapping[str, Any]):
    """The commands, each built when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        return _load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Group(TyperGroup):
    """The commands by name; their help is one line each, for which nothing is loaded."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.commands: Any = _Loaded()

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.about) for name, entry in COMMANDS.items()])


app = typer.Typer(
    name="kronscale",
    help="Scaling studies of distributed K-FAC training.",
    epilog="Example: kronscale plan -f jobs/sweeps/demo.yaml",
    cls=_Group,
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@cache
def _load(name: str) -> Any:
    entry = COMMANDS[name]
    module = import_module(f"harness.cli.{entry.module}")
    if name == "data":
        return typer.main.get_command(module.commands)
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    alone.command(name, cls=Command, epilog=f"Example: kronscale {entry.example}")(getattr(module, name))
    return typer.main.get_command(alone)


@cache
def command_line() -> Any:
    """All commands with their options. typer takes a tenth of a second to build them: once a process."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; a user's mistake is one line on standard error, a traceback is a bug.

    Returns:
        Exit code: 0 ok, 1 runs failed, 2 usage or config, 3 regression, 4 over budget, 130 interrupted.
    """
    os.environ["MPLBACKEND"] = "agg"  # a notebook's would have to be installed here
    _prepare_streams()
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


def _prepare_streams() -> None:
    """Write to nobody where a stream is closed, as by cron, and `?` where a terminal cannot show a letter."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115  to the end
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _print_version(asked: bool) -> None:
    if asked:
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
