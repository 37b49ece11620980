"""How every command parses its line: what the user wrote twice, or left empty by accident, is refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

from typer.core import TyperCommand

from harness.errors import UserError


class Command(TyperCommand):
    """A command whose single-valued options may be given once, and whose values are not empty.

    Otherwise the last of two `-f` would win in silence, and an unset variable of a shell, as in
    `cancel demo --where "$WHICH"`, would select everything.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Check the line, then parse it.

        Raises:
            UserError: an option is given twice that takes one value, or a value is empty.
        """
        if not ctx.resilient_parsing:  # as while the shell completes an unfinished line
            values, _, order = self.make_parser(ctx).parse_args(args=list(args))
            for parameter, times in Counter(order).items():
                if parameter.is_eager:  # --help
                    continue
                name = parameter.opts[0] if parameter.param_type_name == "option" else parameter.name.upper()
                several = parameter.multiple or parameter.nargs != 1
                if times > 1 and parameter.param_type_name == "option" and not several:
                    raise UserError(f"{name} is given {times} times; give it once")
                given = values.get(parameter.name)
                for value in given if several and given else [given]:
                    if isinstance(value, str) and not value.strip():
                        raise UserError(f"{name} is empty; give a value or leave it out (an unset variable?)")
        return super().parse_args(ctx, args)
