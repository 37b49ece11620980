"""Reference of the command line, made from the functions behind the commands."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from typer import Typer
from typer.models import ArgumentInfo, OptionInfo

from harness.cli import COMMANDS


class MissingHelpError(ValueError):
    """A command or an option that no text explains."""


@dataclass(frozen=True)
class Command:
    """A command, as it is typed.

    Attributes:
        about: the first paragraph of its help.
        example: a whole command line; empty if there is none.
    """

    name: str
    function: Callable[..., Any]
    about: str
    example: str


@dataclass(frozen=True)
class Parameter:
    """An argument or option of a command."""

    shown: str
    is_option: bool
    required: bool
    default: str
    meaning: str


def cli_reference() -> str:
    """Every command with its arguments and options."""
    parts: list[str] = []
    for command in commands():
        found = list(parameters(command))
        parts += [f"## `{command.name}`", "", command.about, "", "```text", _usage(command, found), "```", ""]
        if found:
            parts += ["| argument or option | default | meaning |", "|---|---|---|"]
            parts += [
                f"| `{one.shown}` | {one.default} | {one.meaning} |".replace("\\|", "|") for one in found
            ]
            parts.append("")
        if command.example:
            parts += ["Example:", "", "```sh", command.example, "```", ""]
    return "\n".join(parts)


def commands() -> Iterator[Command]:
    """Every command, those of groups included.

    Raises:
        MissingHelpError: one has no text.
    """
    for name, entry in COMMANDS.items():
        module = import_module(f"harness.cli.{entry.module}")
        if name == "data":
            yield from _of(module.commands, "kronscale data")
        else:
            function = getattr(module, name)
            yield _command(f"kronscale {name}", function, f"kronscale {entry.example}")


def parameters(command: Command) -> Iterator[Parameter]:
    """Arguments and options in their order.

    Raises:
        MissingHelpError: one has no text.
    """
    hints = typing.get_type_hints(command.function, include_extras=True)
    for name, parameter in inspect.signature(command.function).parameters.items():
        infos = [
            one
            for one in getattr(hints[name], "__metadata__", ())
            if isinstance(one, (OptionInfo, ArgumentInfo))
        ]
        if not infos:
            continue  # the context
        (info,) = infos
        if info.hidden:
            continue
        if not info.help:
            raise MissingHelpError(f"{command.name}: parameter {name} has no help text")
        is_switch = hints[name].__origin__ is bool
        metavar = info.metavar or name.strip("_").upper().replace("_", "-")
        if isinstance(info, OptionInfo):
            given = (info.default, *(info.param_decls or ()))  # typer keeps the first name as the default
            spelled = [word for word in given if isinstance(word, str) and word.startswith("-")]
            shown = ", ".join(spelled or [f"--{name.strip('_').replace('_', '-')}"])
            shown = shown if is_switch else f"{shown} {metavar}"
        else:
            shown = metavar
        required = parameter.default is inspect.Parameter.empty
        default = "required" if required else _default(parameter.default)
        yield Parameter(shown, isinstance(info, OptionInfo), required, default, " ".join(info.help.split()))


def _of(typer_app: Typer, prefix: str) -> Iterator[Command]:
    for registered in typer_app.registered_commands:
        function = registered.callback
        assert function is not None  # noqa: S101  every command has its function
        name = f"{prefix} {registered.name or function.__name__.replace('_', '-')}"
        yield _command(name, function, (registered.epilog or "").removeprefix("Example: "))


def _command(name: str, function: Callable[..., Any], example: str) -> Command:
    about = inspect.getdoc(function) or ""
    if not about:
        raise MissingHelpError(f"{name} has no docstring")
    return Command(name, function, " ".join(about.split()), example)


def _usage(command: Command, found: list[Parameter]) -> str:
    arguments = [one.shown if one.required else f"[{one.shown}]" for one in found if not one.is_option]
    options = ["[OPTIONS]"] if any(one.is_option for one in found) else []
    return " ".join([command.name, *options, *arguments])


def _default(value: Any) -> str:
    if value is None or value is False or value == ():
        return ""
    return f"`{value}`"
