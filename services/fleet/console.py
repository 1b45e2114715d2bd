"""Prints results to stdout and everything else to stderr. Colours only on a terminal.

A table fits the width of the terminal and cuts off nothing: the next command may need any cell.
"""

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress

import typer
from rich.console import Console, ConsoleOptions, JustifyMethod, RenderResult
from rich.measure import Measurement
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from services.core.security.masking import mask_text
from services.core.yaml_source import BadConfiguration
from services.fleet.problem import CommandFailed

OUT = Console(highlight=False, soft_wrap=True)
ERR = Console(stderr=True, highlight=False, soft_wrap=True)


def print_note(text: str, style: str = "") -> None:
    """Print one line on stderr, without markup and with secrets masked. A write error, e.g. a full disk, is ignored."""
    with suppress(OSError):
        with ERR.capture() as line:  # ERR.print alone would keep a failed line in the console's buffer
            ERR.print(Text(mask_text(text), style=style))
        ERR.file.write(line.get())
        ERR.file.flush()


def confirm(question: str) -> None:
    """Ask the person at the terminal. Raises Abort after a no, and CommandFailed when there is nobody to ask."""
    try:
        typer.confirm(question, abort=True, err=True)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        raise CommandFailed("nobody said yes, so nothing was done", "--yes") from None


def count_progress() -> Progress:
    """A bar on a terminal, for a number of events that is known."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=ERR, disable=not ERR.is_terminal)


_UNLIMITED = 1_000_000
_LEAST_TEXT = 20
_GAP, _INDENT = 2, 2


class FittedTable(Table):
    """A table without lines. `make_table` makes it.

    Free text wraps where the row is too long. If a row is still too long, the columns that do not fit follow below each row,
    each value behind its heading. A file or a pipe gets one line per row, unless COLUMNS is set.
    """

    below_first: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Choose the layout for this width."""
        width = options.max_width if console.is_terminal or "COLUMNS" in os.environ else _UNLIMITED
        measured = [self._measure(console, options, column) for column in self.columns]
        natural = [size.maximum for size in measured]
        least = [
            size.maximum if column.no_wrap else min(size.maximum, max(size.minimum, _LEAST_TEXT))
            for size, column in zip(measured, self.columns, strict=True)
        ]
        if _total(least) <= width:
            yield from super().__rich_console__(console, options.update(max_width=min(width, _total(natural))))
        else:
            if self.title:
                yield Text(str(self.title), style="bold")
            yield from self._lines(console, width, self._choose(natural, width), natural)

    @staticmethod
    def _measure(console: Console, options: ConsoleOptions, column: Column) -> Measurement:
        """minimum: the longest word. maximum: the longest cell."""
        unlimited = options.update(max_width=_UNLIMITED)
        cells = [Measurement.get(console, unlimited, cell) for cell in (column.header, *column.cells)]
        return Measurement(max(cell.minimum for cell in cells), max(cell.maximum for cell in cells))

    def _choose(self, natural: Sequence[int], width: int) -> list[int]:
        """The columns that fit in one line, in their order; at least the first one."""
        shown = [index for index, column in enumerate(self.columns) if column.header not in self.below_first]
        texts = [index for index in shown if not self.columns[index].no_wrap]
        for index in dict.fromkeys([*texts, *reversed(shown)]):
            if _total([natural[one] for one in shown]) > width and index:
                shown.remove(index)
        return shown

    def _lines(self, console: Console, width: int, shown: Sequence[int], natural: Sequence[int]) -> Iterator[Text]:
        columns = [[_text(console, cell) for cell in column.cells] for column in self.columns]
        headings = [_text(console, column.header) for column in self.columns]

        def join(cells: Sequence[Text], style: str = "") -> Text:
            padded = [cell.copy() for cell in cells]
            for index, cell in zip(shown, padded, strict=True):
                cell.align("right" if self.columns[index].justify == "right" else "left", natural[index])
            line = Text(" " * _GAP, style=style).join(padded)
            line.rstrip()
            return line

        below = [index for index in range(len(natural)) if index not in shown]
        below.sort(key=lambda index: not self.columns[index].no_wrap)
        yield join([headings[index] for index in shown], "bold")
        for row in range(self.row_count):
            yield join([columns[index][row] for index in shown])
            rest = [(headings[index], columns[index][row]) for index in below]
            yield from _wrapped(
                [Text.assemble((name.plain, "dim"), " ", cell) for name, cell in rest if cell.plain], width
            )


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _text(console: Console, cell: object) -> Text:
    return cell if isinstance(cell, Text) else console.render_str(str(cell))


def _wrapped(items: Sequence[Text], width: int) -> Iterator[Text]:
    """Indented lines of whole items. Only an item that is longer than a line is broken, between words."""
    line = Text(" " * _INDENT)
    for item in items:
        gap, parts = " " * _GAP, [item]
        if _INDENT + item.cell_len > width:
            gap, parts = " ", list(item.split(" "))
            if line.plain.strip():
                yield line
                line = Text(" " * _INDENT)
        for part in parts:
            if line.plain.strip() and line.cell_len + len(gap) + part.cell_len > width:
                yield line
                line = Text(" " * _INDENT)
            if line.plain.strip():
                line.append(gap)
            line.append_text(part)
    if line.plain.strip():
        yield line


def make_table(
    *columns: str,
    right: Collection[str] = (),
    text: Collection[str] = (),
    below: Sequence[str] = (),
    title: str | None = None,
) -> FittedTable:
    """An empty table. right: the columns that are aligned to the right. text: the columns that may wrap.

    below: the columns that leave a row first when it is too long, all at once; then those of `text`, then the last one.
    """
    table = FittedTable(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.below_first = below
    for column in columns:
        justify: JustifyMethod = "right" if column in right else "left"
        table.add_column(column, no_wrap=column not in text, overflow="fold", justify=justify)
    return table


def print_failure(error: CommandFailed) -> None:
    """Print the error, then the remedy. A stop by Ctrl-C (130) was wanted, so it is not called an error."""
    kind = ("", "") if error.status == 130 else ("error: ", "bold red")
    ERR.print(Text.assemble(kind, mask_text(error.what)))
    if error.remedy:
        ERR.print(Text.assemble(("  Try: ", "bold"), mask_text(error.remedy)))


def print_problems(error: BadConfiguration) -> None:
    """Print each mistake on its own line."""
    for problem in error.problems:
        ERR.print(Text.assemble(("error: ", "bold red"), str(problem)))
