"""`penstock listen`."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import orjson
import typer
import uvloop
from rich.text import Text

from services.core.pipe_file.webhook import Secret
from services.core.security.credentials import BadCredential, read_value
from services.core.security.masking import mask_text
from services.core.security.signing import BadSecret, SigningKey, read_signing_keys
from services.fleet.console import OUT, print_note
from services.fleet.problem import CommandFailed
from services.fleet.receiver import REFUSAL, Received, Receiver, serve_receiver
from services.fleet.stop import stop_on_signals
from services.fleet.up.ports import next_free_port
from services.fleet.verbs.app import APP, example

SHOWN_EVENTS = 3
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


@APP.command(
    epilog=example(
        "penstock listen --port 9000 --secret-file webhook.secret\npenstock listen --port 9000 --fail 0.2 --slow 50\n"
        "penstock listen --port 9000 --status 400"
    )
)
def listen(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="The port to listen on; 0: any free port.")],
    host: Annotated[str, typer.Option("--host", help="The address to listen on.")] = "127.0.0.1",
    secret_file: Annotated[
        Path | None,
        typer.Option("--secret-file", help="A file with the signing secret (whsec_…); or set PENSTOCK_WEBHOOK_SECRET."),
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option("--token-file", help="A file with the bearer token; a request without it is answered with 401."),
    ] = None,
    fail: Annotated[
        float | None,
        typer.Option("--fail", min=0, max=1, help="Refuse this share of requests. Default: none, with --status all."),
    ] = None,
    status: Annotated[
        int | None, typer.Option("--status", min=300, max=599, help="The status of refused requests. Default: 503.")
    ] = None,
    slow: Annotated[int, typer.Option("--slow", min=0, help="Milliseconds before each answer.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per event on stdout.")] = False,
) -> None:
    """Receive webhooks: verify their signatures and tokens, print the events, count duplicates. For tests only.

    Prints whole events, except on a terminal: there at most three per request, each on one line.
    """
    share = fail if fail is not None else 0.0 if status is None else 1.0
    show = _print_json if as_json else _print_lines
    receiver = Receiver(_keys(secret_file), share, slow / 1000, show, _token(token_file), status or REFUSAL)
    try:
        uvloop.run(_run(receiver, host, port))
    except OSError as error:
        remedy = f"--port {next_free_port(host, port)}, or stop the program that listens there"
        raise CommandFailed(f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}", remedy) from error


def _keys(secret_file: Path | None) -> tuple[SigningKey, ...]:
    if secret_file is None and "PENSTOCK_WEBHOOK_SECRET" not in os.environ:
        return ()
    secret = Secret(file=secret_file) if secret_file is not None else Secret(env="PENSTOCK_WEBHOOK_SECRET")
    try:
        return read_signing_keys(secret, Path(), os.environ)
    except BadSecret as error:
        raise CommandFailed(str(error), status=2) from error


def _token(token_file: Path | None) -> str:
    try:
        return "" if token_file is None else read_value(Secret(file=token_file), Path(), os.environ, token=True)
    except BadCredential as error:
        raise CommandFailed(str(error), status=2) from error


async def _run(receiver: Receiver, host: str, port: int) -> None:
    with stop_on_signals() as stop:
        async with serve_receiver(receiver, host, port) as bound:
            checked = "signatures are verified" if receiver.keys else "signatures are not verified (no --secret-file)"
            checked += "; the token of each request is verified" if receiver.token else ""
            if receiver.fail:
                checked += f"; {receiver.fail:.0%} of the requests are answered with {receiver.refusal}"
            print_note(f"Listening on http://{host}:{bound}/ ; {checked}. Ctrl-C ends it.", "bold green")
            await stop.asked.wait()
    print_note(
        f"{receiver.delivered} events, and {receiver.duplicates} duplicates of them, in {receiver.requests} requests; "
        f"{receiver.failed} refused on purpose, {receiver.unsigned} with a bad signature"
        + (f", {receiver.unauthorized} without the token" if receiver.token else "")
    )
    if receiver.without_id:
        print_note(
            f"{receiver.without_id} events have no id in their body (json, ndjson): an event in two requests counts as two",
            "yellow",
        )


def _print_json(received: Received) -> None:
    for text in received.texts:
        checks = {"verified": received.signed, "authorized": received.authorized}
        line = {"webhook_id": received.webhook_id, **checks, "event": orjson.Fragment(_one_line(text))}
        typer.echo(orjson.dumps(line).decode())


def _one_line(text: bytes) -> str:
    """JSON as it was received: numbers with all their digits. A line break in JSON is never part of a value."""
    return text.decode(errors="replace").replace("\r", " ").replace("\n", " ")


def _shown(event: Mapping[str, Any], text: bytes) -> str:
    """A CloudEvent as its id and its data, another event as it is."""
    if "id" not in event or "data" not in event:
        return _one_line(text)
    return f"{event['id']}  {_one_line(bytes(_FIELDS.decode(text)['data']))}"


def _print_lines(received: Received) -> None:
    clock = time.strftime("%H:%M:%S", time.localtime(received.at))
    duplicates = len(received.events) - len(received.new)
    signed = {
        True: "signature good",
        False: "signature bad (made with another secret?)",
        None: "signature not checked",
    }[received.signed]
    if received.authorized is not None:
        signed = f"token good, {signed}" if received.authorized else "token bad"
    tail = f" and {duplicates} duplicates" if duplicates else ""
    is_refused = received.signed is False or received.authorized is False
    what = f"refused: {signed}" if is_refused else f"{len(received.new)} events{tail}, {signed}"
    OUT.print(Text(f"{clock} {received.webhook_id} {what}", style="bold"))
    is_cut = False
    shown = list(zip(received.new, received.texts, strict=True))[: SHOWN_EVENTS if OUT.is_terminal else None]
    for event, received_text in shown:
        text = Text(mask_text(f"  {_shown(event, received_text)}"))
        if OUT.is_terminal:
            is_cut |= text.cell_len > OUT.width
            text.truncate(OUT.width, overflow="ellipsis")
        OUT.print(text)
    more = len(received.new) - SHOWN_EVENTS if OUT.is_terminal else 0
    if more > 0 or is_cut:
        OUT.print(Text(f"  … {f'and {more} more; ' if more > 0 else ''}--json for all of it", style="dim"))
