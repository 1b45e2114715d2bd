"""`penstock keys`: API keys for senders, signing secrets for receivers."""

import datetime
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import typer
from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from services.core.security.keys import ApiKey, add_key, expire_key, load_keys, make_key, revoke_key
from services.core.security.signing import make_secret
from services.core.times import parse_date
from services.core.units import parse_duration
from services.core.yaml_source import describe
from services.fleet.access import find_fleet, find_keys
from services.fleet.console import OUT, make_table, print_note
from services.fleet.dead.view import plain
from services.fleet.problem import CommandFailed
from services.fleet.verbs.app import APP, AsJson, Data, example

KEYS = typer.Typer(help="API keys for senders, signing secrets for receivers.", no_args_is_help=True)
APP.add_typer(KEYS, name="keys")

KeysPath = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        envvar="PENSTOCK_INGEST_KEYS",
        help="The keys file that ingest and the tables read. Default: that of the fleet on --data, else keys.yaml.",
    ),
]


def _now() -> str:
    return _format(time.time())


def _format(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _read_end(text: str) -> str:
    """RFC 3339, from a date, a time, or `90d` from now."""
    now = time.time()
    try:
        until = now + parse_duration(text)
    except ValueError:
        try:
            until = parse_date(text)
        except ValueError as error:
            reason, _, remedy = str(error).partition(". Try: ")
            raise CommandFailed(reason, f"{remedy} or 90d (from now)", status=2) from None
    if until <= now:
        raise CommandFailed(f"{text} is in the past", "a later date, or: penstock keys revoke", status=2)
    try:
        return _format(until)
    except (ValueError, OverflowError):
        raise CommandFailed(f"{text} is too far away", "2027-01-31", status=2) from None


@KEYS.command(epilog=example('penstock keys create --name "the orders service" --stream orders > orders.key'))
def create(
    stream: Annotated[list[str], typer.Option("--stream", help="A stream of the key. Repeatable. '*': all streams.")],
    name: Annotated[str, typer.Option("--name", help="The owner of the key.")] = "",
    scope: Annotated[
        Literal["ingest", "read"], typer.Option("--scope", help="ingest: the key sends events. read: it reads tables.")
    ] = "ingest",
    manage: Annotated[
        bool, typer.Option("--manage", help="The key may also register schemas of these streams.")
    ] = False,
    rate: Annotated[
        int | None, typer.Option("--rate", min=1, help="The most events per second, per ingest process.")
    ] = None,
    expires: Annotated[
        str | None,
        typer.Option(
            "--expires",
            help="When the key begins to be refused: 2027-01-31 (00:00 UTC), a time, or 90d from now. Default: never.",
        ),
    ] = None,
    keys: KeysPath = None,
    data: Data = Path("data"),
) -> None:
    """Create an API key. It is printed once, on stdout; only its hash is stored."""
    until = None if expires is None else _read_end(expires)
    try:
        token, entry = make_key(
            streams=stream,
            scopes=[scope, "manage"] if manage else [scope],
            name=name,
            rate=rate,
            created=_now(),
            expires=until,
        )
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        field = problem["loc"][0]
        remedy = "a stream's name, or '*'" if field == "streams" else ""
        raise CommandFailed(f"{field}: {describe(problem)}", remedy, status=2) from None
    path = find_keys(keys, data)
    try:
        add_key(path, entry)
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}") from error
    typer.echo(token)
    print_note(f"Key {entry.id} is in {path}. The line above is not shown again.", "green")
    if scope == "read":
        print_note("A table service that reads this file accepts the key within seconds.", "green")
        return
    fleet = find_fleet(data)
    if fleet is None or fleet.keys == str(path.absolute()):
        print_note("Ingest accepts the key within seconds.", "green")
    else:
        other = "needs no key" if fleet.keys is None else f"reads {fleet.keys}"
        print_note(f"The fleet on {data} {other}. Try: PENSTOCK_INGEST_KEYS={path} penstock up", "yellow")


@KEYS.command("list", epilog=example("penstock keys list"))
def list_keys(keys: KeysPath = None, data: Data = Path("data"), as_json: AsJson = False) -> None:
    """List the keys, without their secrets."""
    found = load_keys(find_keys(keys, data))
    if as_json:
        typer.echo(json.dumps([key.model_dump(exclude={"hash"}) for key in found]))
        return
    OUT.print(key_table(found))


def key_table(keys: Iterable[ApiKey]) -> Table:
    table = make_table(
        "id",
        "name",
        "scopes",
        "rate",
        "created",
        "expires",
        "revoked",
        "streams",
        right=["rate"],
        text=["name", "streams"],
    )
    for key in keys:
        rate = "" if key.rate is None else str(key.rate)
        name, streams = Text(plain(key.name)), Text(", ".join(key.streams))
        table.add_row(
            key.id, name, ", ".join(key.scopes), rate, key.created, key.expires or "", key.revoked or "", streams
        )
    return table


@KEYS.command(epilog=example("penstock keys revoke k3v9x0qa"))
def revoke(
    key_id: Annotated[str, typer.Argument(help="The key's id from `penstock keys list`.")],
    keys: KeysPath = None,
    data: Data = Path("data"),
) -> None:
    """Revoke a key. It is refused within seconds."""
    path = find_keys(keys, data)
    if not path.exists():
        raise CommandFailed(f"there is no {path}", "--keys with the file that ingest reads", status=2)
    if not revoke_key(path, key_id, _now()):
        raise CommandFailed(f"{path} has no key {key_id[:40]!r}", "penstock keys list")
    print_note(f"Key {key_id} is revoked.", "green")


@KEYS.command(epilog=example("penstock keys expire k3v9x0qa 2027-01-31"))
def expire(
    key_id: Annotated[str, typer.Argument(help="The key's id from `penstock keys list`.")],
    when: Annotated[str, typer.Argument(help="2027-01-31 (00:00 UTC), a time, 90d from now, or never.")],
    keys: KeysPath = None,
    data: Data = Path("data"),
) -> None:
    """Set the date from which a key is refused."""
    path = find_keys(keys, data)
    if not path.exists():
        raise CommandFailed(f"there is no {path}", "--keys with the file that ingest reads", status=2)
    until = None if when == "never" else _read_end(when)
    if not expire_key(path, key_id, until):
        raise CommandFailed(f"{path} has no key {key_id[:40]!r}", "penstock keys list")
    print_note(f"Key {key_id} expires {f'at {until}' if until else 'never'}.", "green")


@KEYS.command(epilog=example("penstock keys secret webhook.secret"))
def secret(path: Annotated[Path, typer.Argument(help="The file to write.")]) -> None:
    """Create a webhook signing secret in a new file that only you can read. Give a copy to the receiver."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise CommandFailed(f"{path} exists already and was not changed", "another name") from error
    except OSError as error:
        raise CommandFailed(f"{path} cannot be written: {error.strerror}") from error
    with os.fdopen(descriptor, "w") as file:
        file.write(f"{make_secret()}\n")
    print_note(f"Wrote {path}. In the pipe file: secret: {{file: {path}}}", "green")
