"""A demo's progress: moving bars on a terminal, a plain line every other second elsewhere. All on stderr."""

import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.text import Text

from services.fleet.console import ERR, note

PLAIN_EVERY_S = 2.0


class Display:
    """`total` events on their way, a row for each place that they come by. A context manager; not used from two threads."""

    def __init__(self, total: int, rows: Sequence[str]) -> None:
        self._total = total
        self._counts = dict.fromkeys(rows, 0)
        self._more = dict.fromkeys(rows, "")
        self._said = 0.0
        self._bars = Progress(
            SpinnerColumn(), TextColumn("{task.description:<12}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[more]}"), console=ERR, disable=not ERR.is_terminal,
        )  # fmt: skip
        self._rows = {name: self._bars.add_task(name, total=total, more="") for name in rows}

    def show(self, counts: Mapping[str, int], more: Mapping[str, str]) -> None:
        """The counts by row, and words (rich markup) behind some of them."""
        self._counts |= counts
        self._more |= more
        if not ERR.is_terminal:
            if time.monotonic() - self._said >= PLAIN_EVERY_S:
                self._say()
            return
        for name, count in self._counts.items():
            self._bars.update(self._rows[name], completed=count, more=self._more[name])

    def _say(self) -> None:
        self._said = time.monotonic()
        parts = [f"{name} {count}/{self._total} {self._more[name]}".rstrip() for name, count in self._counts.items()]
        note(Text.from_markup(", ".join(parts)).plain, "dim")

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()
        if not ERR.is_terminal:
            self._say()
