"""The demo's progress: moving bars on a terminal, a plain line every other second elsewhere. All on stderr."""

import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

from services.fleet.console import ERR, note

PLAIN_EVERY_S = 2.0
ROWS = ("accepted", "transformed", "delivered")


class Display:
    """`total` events on their way. A context manager; not used from two threads."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._counts = dict.fromkeys(ROWS, 0)
        self._said = 0.0
        self._bars = Progress(
            SpinnerColumn(), TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[more]}"), console=ERR, disable=not ERR.is_terminal,
        )  # fmt: skip
        self._rows = {name: self._bars.add_task(name, total=total, more="") for name in ROWS}

    def show(self, counts: dict[str, int], more: str) -> None:
        """The counts by row, and a word behind the last one."""
        self._counts |= counts
        if not ERR.is_terminal:
            if time.monotonic() - self._said >= PLAIN_EVERY_S:
                self._say(more)
            return
        for name, count in self._counts.items():
            self._bars.update(self._rows[name], completed=count, more=more if name == ROWS[-1] else "")

    def _say(self, more: str) -> None:
        self._said = time.monotonic()
        counts = ", ".join(f"{name} {count}/{self._total}" for name, count in self._counts.items())
        note(f"{counts}{', ' if more else ''}{more}", "dim")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()
        if not ERR.is_terminal:
            self._say("")
