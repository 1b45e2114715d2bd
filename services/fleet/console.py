"""Where the command line prints: results to stdout, everything else to stderr. Colours only on a terminal."""

from contextlib import suppress

from rich.console import Console
from rich.text import Text

from services.core.masking import mask_text
from services.core.yaml_source import BadConfiguration
from services.fleet.problem import CommandFailed

OUT = Console(highlight=False, soft_wrap=True)
ERR = Console(stderr=True, highlight=False, soft_wrap=True)


def note(text: str, style: str = "") -> None:
    """One line for a person, on stderr; never parsed for markup, never with a secret. A file that is full takes none."""
    with suppress(OSError):
        with ERR.capture() as line:  # printed directly, it would stay in the console's own memory each time
            ERR.print(Text(mask_text(text), style=style))
        ERR.file.write(line.get())
        ERR.file.flush()


def print_failure(error: CommandFailed) -> None:
    """What failed, then what to try."""
    ERR.print(Text.assemble(("error: ", "bold red"), mask_text(error.what)))
    if error.remedy:
        ERR.print(Text.assemble(("  Try: ", "bold"), mask_text(error.remedy)))


def print_problems(error: BadConfiguration) -> None:
    """Every mistake, one a line."""
    for problem in error.problems:
        ERR.print(Text.assemble(("error: ", "bold red"), str(problem)))
