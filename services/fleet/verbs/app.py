"""The application that the verbs register with."""

import typer

APP = typer.Typer(
    name="penstock",
    help="Events in over HTTP, through Spark, out to signed webhooks; none lost. Start with [bold]penstock demo[/bold].",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def example(text: str) -> str:
    """The last paragraph of a verb's help: what one would type."""
    lines = "\n\n".join(f"  [cyan]{line}[/cyan]" for line in text.strip().splitlines())
    return f"[bold]Example[/bold]\n\n{lines}"
