"""Prints results to stdout and everything else to stderr. Colours only on a terminal."""

from collections.abc import Collection
from contextlib import suppress

from rich.console import Console
from rich.table import Table
from rich.text import Text

from services.core.masking import mask_text
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


def make_table(*columns: str, right: Collection[str] = (), title: str | None = None) -> Table:
    """An empty table without lines. right: the columns that are aligned to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column, no_wrap=True, justify="right" if column in right else "left")
    return table


def print_failure(error: CommandFailed) -> None:
    """Print the error, then the remedy."""
    ERR.print(Text.assemble(("error: ", "bold red"), mask_text(error.what)))
    if error.remedy:
        ERR.print(Text.assemble(("  Try: ", "bold"), mask_text(error.remedy)))


def print_problems(error: BadConfiguration) -> None:
    """Print each mistake on its own line."""
    for problem in error.problems:
        ERR.print(Text.assemble(("error: ", "bold red"), str(problem)))
