"""Watching a study until nothing is in flight: a live picture in a terminal, plain lines in a pipe."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from harness.study.cell_states import IN_FLIGHT
from harness.study.status import CellStatus, count_states

_LEAST_PAUSE_SECONDS = 0.5
_DUTY = 0.05  # most of one CPU that looking may take from the ranks, whose time is being measured
_LINE_SECONDS = 30.0  # in a pipe a line appears at every change of the counts, and at least this often
_MOST_ROWS = 20


def follow(look: Callable[[], Sequence[CellStatus]], screen: Console) -> Sequence[CellStatus]:
    """Show progress until no cell is pending or running.

    Args:
        look: reads the statuses afresh.
        screen: where to show them.

    Returns:
        The last look.
    """
    return _follow_live(look, screen) if screen.is_terminal else _follow_in_lines(look, screen)


def state_counts(statuses: Sequence[CellStatus]) -> str:
    """Such as `38 COMPLETED, 2 RUNNING`."""
    counts = count_states(statuses)
    return ", ".join(f"{count} {state}" for state, count in counts.items()) or "no cells"


def duration(seconds: float | None) -> str:
    """Seconds for people: `1h02m`, `3m05s`, `12s`; `-` if not known."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"


def steps(status: CellStatus) -> str:
    """Such as `41/300`; empty before the first step."""
    if status.step is None:
        return ""
    return f"{status.step}/{status.total_steps}" if status.total_steps else str(status.step)


def metric(status: CellStatus) -> str:
    """The newest value beside its target, such as `accuracy 0.953 (>= 0.97)`."""
    target = status.cell.target
    sign = ">=" if target.direction == "higher" else "<="
    value = f"{status.value:.4g}" if status.value is not None else "-"
    return f"{target.metric} {value} ({sign} {target.value:g})"


def _follow_live(look: Callable[[], Sequence[CellStatus]], screen: Console) -> Sequence[CellStatus]:
    with Live(console=screen, auto_refresh=False) as live:
        while True:
            begins = time.monotonic()
            statuses = look()
            live.update(_picture(statuses), refresh=True)
            if not _in_flight(statuses):
                return statuses
            _pause(time.monotonic() - begins)


def _follow_in_lines(look: Callable[[], Sequence[CellStatus]], screen: Console) -> Sequence[CellStatus]:
    said, said_at = "", 0.0
    while True:
        begins = time.monotonic()
        statuses = look()
        line = state_counts(statuses)
        if line != said or begins - said_at > _LINE_SECONDS:
            screen.print(f"{time.strftime('%H:%M:%S')} {line}", soft_wrap=True)
            said, said_at = line, begins
        if not _in_flight(statuses):
            return statuses
        _pause(time.monotonic() - begins)


def _pause(cost_seconds: float) -> None:
    time.sleep(max(_LEAST_PAUSE_SECONDS, cost_seconds / _DUTY))


def _in_flight(statuses: Sequence[CellStatus]) -> bool:
    return any(status.state in IN_FLIGHT for status in statuses)


def _picture(statuses: Sequence[CellStatus]) -> RenderableType:
    bar = Progress(BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    final = sum(status.final for status in statuses)
    bar.add_task(state_counts(statuses), total=len(statuses), completed=final)
    running = [status for status in statuses if status.state == "RUNNING"]
    table = Table(box=None, pad_edge=False)
    for heading in ("method", "ranks", "seed", "step", "phase", "metric", "elapsed", "at most"):
        table.add_column(heading)
    for status in running[:_MOST_ROWS]:
        cell = status.cell
        named = (cell.method, str(cell.world_size), str(cell.seed), steps(status), status.phase or "start")
        times = (duration(status.elapsed_seconds), duration(status.eta_seconds))
        table.add_row(*named, metric(status), *times)
    return Group(bar, table) if running else bar
