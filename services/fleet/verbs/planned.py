"""`penstock planned`: actions during which loss raises no alarm."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
import uvloop
from rich.table import Table

from services.core.units import format_duration, parse_duration
from services.fleet.console import OUT, make_table, print_note
from services.fleet.dead.audit import whoami
from services.fleet.dead.view import plain
from services.fleet.observer_client import ask, find_observer, get_json
from services.fleet.problem import CommandFailed
from services.fleet.verbs.app import APP, AsJson, Data, ObserverAddress, ObserverToken, example

PLANNED = typer.Typer(help="Planned actions: while one lasts, loss raises no alarm.", no_args_is_help=True)
APP.add_typer(PLANNED, name="planned")

_MAX_BY = 63
KINDS = ("deploy", "scaling", "pause")


@PLANNED.command("list", epilog=example("penstock planned list"))
def list_planned(
    observer: ObserverAddress = None,
    token_file: ObserverToken = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """List the planned actions of the last day, and who announced and cancelled them."""
    body = uvloop.run(get_json(find_observer(observer, data, token_file), "/v1/planned", {}))
    if as_json:
        typer.echo(json.dumps(body))
        return
    if not body["planned"]:
        print_note("No action was announced in the last day")
        return
    OUT.print(planned_table(body["planned"]))


def planned_table(planned: Sequence[dict[str, Any]]) -> Table:
    """One row per announced action, as the observer gives it."""
    table = make_table("id", "action", "pipe", "from", "until", "announced by", "cancelled by")
    for one in planned:
        who = _who(one["by"], one["token"])
        ended = "" if one["cancelled_by"] is None else _who(one["cancelled_by"], one["cancelled_token"])
        table.add_row(one["id"], one["kind"], one["pipe"] or "all", one["from"], one["until"], who, ended)
    return table


@PLANNED.command(
    epilog=example("penstock planned announce deploy --for 15m\npenstock planned announce pause --pipe shop")
)
def announce(
    kind: Annotated[str, typer.Argument(help="deploy, scaling or pause.")],
    duration: Annotated[str, typer.Option("--for", help="How long it lasts, 24h at most.")] = "10m",
    pipe: Annotated[str | None, typer.Option(help="The pipe. Default: all pipes.")] = None,
    observer: ObserverAddress = None,
    token_file: ObserverToken = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Announce an action that begins now. Missing events of its minutes raise no alarm."""
    if kind not in KINDS:
        raise CommandFailed(f"{kind[:40]!r} is no kind of action", f"one of: {', '.join(KINDS)}", status=2)
    try:
        seconds = round(parse_duration(duration))
    except ValueError as error:
        raise CommandFailed(f"--for: {error}", "--for 15m", status=2) from error
    wanted = {"kind": kind, "seconds": seconds, "pipe": pipe, "by": whoami()[:_MAX_BY]}
    one = uvloop.run(ask(find_observer(observer, data, token_file), "POST", "/v1/planned", {}, wanted))
    if as_json:
        typer.echo(json.dumps(one))
        return
    where = f"of {pipe}" if pipe is not None else "of all pipes"
    print_note(f"{kind} {where} for {format_duration(seconds)}, until {one['until']}. To end it early: "
               f"penstock planned cancel {one['id']}")  # fmt: skip


@PLANNED.command(epilog=example("penstock planned cancel 1f0c93ab"))
def cancel(
    name: Annotated[str, typer.Argument(metavar="ID", help="From `penstock planned list`.")],
    observer: ObserverAddress = None,
    token_file: ObserverToken = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """End a planned action now. From now on loss raises alarms again."""
    found, by = find_observer(observer, data, token_file), whoami()[:_MAX_BY]
    one = uvloop.run(ask(found, "DELETE", f"/v1/planned/{quote(name, safe='')}", {"by": by}))
    if as_json:
        typer.echo(json.dumps(one))
        return
    print_note(plain(_cancelled(one), 200))


def _cancelled(one: dict[str, Any]) -> str:
    if one["cancelled_by"] is None:
        return f"the {one['kind']} was over already, at {one['until']}"
    return (
        f"the {one['kind']} ended at {one['until']}, cancelled by {_who(one['cancelled_by'], one['cancelled_token'])}"
    )


def _who(by: str, token: str | None) -> str:
    """The client gives its name itself; the token is certain."""
    return plain((by or "somebody") + (f" (token {token})" if token is not None else ""), 100)
