"""Where the command line prints: results to stdout, everything else to stderr. Colours only on a terminal."""

from rich.console import Console
from rich.text import Text

from services.core.masking import mask_text
from services.core.yaml_source import BadConfiguration
from services.fleet.problem import CommandFailed

OUT = Console(highlight=False, soft_wrap=True)
ERR = Console(stderr=True, highlight=False, soft_wrap=True)


def note(text: str, style: str = "") -> None:
    """One line for a person, on stderr; never parsed for markup, never with a secret."""
    ERR.print(Text(mask_text(text), style=style))


def print_failure(error: CommandFailed) -> None:
    """What failed, then what to try."""
    ERR.print(Text.assemble(("error: ", "bold red"), mask_text(error.what)))
    if error.remedy:
        ERR.print(Text.assemble(("  Try: ", "bold"), mask_text(error.remedy)))


def print_problems(error: BadConfiguration) -> None:
    """Every mistake, one a line."""
    for problem in error.problems:
        ERR.print(Text.assemble(("error: ", "bold red"), str(problem)))
