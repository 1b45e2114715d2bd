"""`penstock send`."""

import asyncio
import io
import json
import os
import re
import stat
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer
import uvloop
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from services.core.pipe_file.pipes import NAME_PATTERN, load_pipes
from services.fleet.access import find_fleet, ingest_url, require_fleet
from services.fleet.console import ERR, print_note
from services.fleet.folder import FleetState
from services.fleet.problem import CommandFailed, unreadable_file
from services.fleet.sending.event_source import STDIN, BadInput, InputFile, read_events
from services.fleet.sending.sender import GIVE_UP_AFTER_S, SendingFailed, SendSummary, Target, probe, send_events
from services.fleet.stop import Stop, stop_on_signals
from services.fleet.verbs.app import APP, Data, example

MAX_BYTES = 10_000

KeyFile = Annotated[Path | None, typer.Option("--key-file", help="A file with the API key; or set PENSTOCK_KEY.")]


def read_secret_file(path: Path) -> str:
    """The text of the file, stripped. Blocking. Raises CommandFailed, whose message never shows the content."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & stat.S_IRWXO:
                raise CommandFailed(
                    f"{path} can be read or written by everybody on this machine", f"chmod 600 {path}", status=2
                )
            return file.read(MAX_BYTES).decode("ascii", errors="replace").strip()
    except OSError as error:
        raise unreadable_file(path, error) from error


def read_api_key(key_file: Path | None, environ: Mapping[str, str]) -> str | None:
    """The API key from the file, else from PENSTOCK_KEY, else None. Raises CommandFailed."""
    key = read_secret_file(key_file) if key_file is not None else environ.get("PENSTOCK_KEY")
    if key is not None and (not key or not key.isprintable() or " " in key):
        where = str(key_file) if key_file is not None else "PENSTOCK_KEY"
        raise CommandFailed(f"{where} holds no API key", "penstock keys create", status=2)
    return key


@APP.command(
    epilog=example(
        "penstock send flights examples/flights.ndjson.gz\n"
        "my-export | penstock send orders - --rate 500\n"
        "PENSTOCK_KEY=psk_… penstock send orders orders.json --url https://ingest.example.org"
    )
)
def send(
    stream: Annotated[str, typer.Argument(help="The stream to send to.")],
    file: Annotated[str, typer.Argument(help="A JSON array, NDJSON, or either gzipped; -: standard input.")] = "-",
    url: Annotated[
        str | None,
        typer.Option(
            "--url", envvar="PENSTOCK_URL", help="The address of ingest. Default: that of the fleet on --data."
        ),
    ] = None,
    key_file: KeyFile = None,
    batch: Annotated[int, typer.Option("--batch", min=1, max=10_000, help="The most events per request.")] = 100,
    in_flight: Annotated[
        int,
        typer.Option("--in-flight", min=1, max=64, help="Requests in flight at once; 1 keeps the order of the file."),
    ] = 4,
    rate: Annotated[float, typer.Option("--rate", min=0, help="The most events per second; 0: no limit.")] = 0,
    data: Data = Path("data"),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object with the summary on stdout.")] = False,
) -> None:
    """Send events from a file or pipe to a stream. Retries events that ingest did not accept, with the same event ids.

    Without --url they go to the fleet that runs on --data.

    Status 0 when every event was accepted, 1 otherwise.
    """
    if not re.fullmatch(NAME_PATTERN, stream):
        raise CommandFailed(f"{stream!r} is not a stream's name", "a name under streams: in the pipe file", status=2)
    if url is not None and not _is_address(url):
        raise CommandFailed("--url needs the address of ingest", "--url http://127.0.0.1:8080", status=2)
    key = read_api_key(key_file, os.environ)
    summary = SendSummary()
    begun = time.monotonic()
    with _open(file) as raw:
        fleet, url = _find_ingest(url, data)
        target = Target(url, stream, key, batch, in_flight, rate)
        failure = uvloop.run(_run(raw, target, summary, file, data, fleet))
    if failure is None or summary.requests or as_json:
        _print_summary(summary, time.monotonic() - begun, as_json=as_json)
    if failure is not None:
        raise failure
    if summary.refused or summary.skipped:
        raise typer.Exit(1)


def _find_ingest(url: str | None, data: Path) -> tuple[FleetState | None, str]:
    """(the fleet on `data` if it is its ingest, the URL as given or of that fleet). Blocking. Raises CommandFailed."""
    if url is None:
        fleet = require_fleet(data, "--url with the address of ingest")
        return fleet, ingest_url(fleet.listen)
    own = find_fleet(data)
    return (own if own is not None and url.rstrip("/") == ingest_url(own.listen) else None), url


def _open(file: str) -> InputFile:
    try:
        return InputFile(STDIN if file == "-" else Path(file))
    except OSError as error:
        raise unreadable_file(Path(file), error) from error


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        whole = parts.hostname and parts.port != 0 and not parts.username and not parts.query
    except ValueError:  # not a port
        return False
    return parts.scheme in ("http", "https") and bool(whole)


async def _run(
    raw: InputFile, target: Target, summary: SendSummary, name: str, data: Path, fleet: FleetState | None
) -> CommandFailed | None:
    """Send until the end or Ctrl-C. Returns the error, so that the summary is printed first.

    fleet: the fleet on `data` if the events go to its ingest. Its supervisor starts ingest again, so that is waited for.
    """
    with stop_on_signals() as stop:
        try:
            trouble = await stop.interrupt(probe(target.url), "stopped; nothing was sent")
        except CommandFailed as error:
            return error
        if trouble and fleet is None:
            return CommandFailed(
                f"nothing was sent to {target.url}: {trouble}", "--url, or --data with the folder of a fleet"
            )
        if trouble:
            where = f"ingest of the fleet on {data} at {target.url}"
            print_note(f"waiting for {where}, for up to {GIVE_UP_AFTER_S:.0f} s: {trouble}", "yellow")
        return await _send(raw, target, summary, name, fleet, stop, trouble)


async def _send(
    raw: InputFile, target: Target, summary: SendSummary, name: str, fleet: FleetState | None, stop: Stop, trouble: str
) -> CommandFailed | None:
    """As `_run`. trouble: the printed reason why nothing can be sent now, or ""."""
    source = io.BufferedReader(raw)
    size = os.fstat(raw.fileno()).st_size if name != "-" else 0
    with _progress(size) as progress:
        bar = progress.add_task(f"sending to {target.stream}", total=size or None, accepted=0)

        def show() -> None:
            nonlocal trouble
            if summary.trouble and not trouble:
                print_note(f"{target.url}: {summary.trouble}; trying again for up to {GIVE_UP_AFTER_S:.0f} s", "yellow")
            trouble = summary.trouble
            progress.update(bar, completed=source.tell() if size else None, accepted=summary.accepted)

        try:
            sending = send_events(read_events(source), target, summary, show)
            await stop.interrupt(sending, "stopped; events in flight may have been stored")
        except CommandFailed as error:
            raw.stop()  # ends the read of the thread, which would block the end of the event loop
            return error
        except BadInput as error:
            remedy = "mending the input; the events before the damage were sent, see the summary"
            if not summary.accepted and not summary.refused:
                remedy = "a JSON array, or one JSON object per line; nothing was sent"
            return CommandFailed(f"{name}: {error}", remedy)
        except SendingFailed as error:
            remedy = await asyncio.to_thread(_remedy, error.status, fleet)
            return CommandFailed(f"{target.url}: {error}; the remaining events were not sent", remedy)
        except OSError as error:
            return CommandFailed(f"{name} cannot be read: {error.strerror}")
        return None


def _remedy(status: int, fleet: FleetState | None) -> str:
    """A thing to try after this answer. Blocking."""
    if status in (401, 403):
        return "--key-file or PENSTOCK_KEY with a key for this stream; penstock keys create makes one"
    if status == 404:
        streams = ", ".join(load_pipes(Path(fleet.pipes)).streams) if fleet is not None else ""
        known = f"one of the fleet's streams: {streams}" if streams else "a stream of its pipe file"
        return f"{known}; with an API key, a stream for which the key was made"
    if 300 <= status < 500 and status not in (408, 429):
        return "--url with the address of ingest"
    return "penstock status"


def _progress(size: int) -> Progress:
    columns = [SpinnerColumn(), TextColumn("{task.description}")]
    columns += [BarColumn(), TaskProgressColumn(), TimeRemainingColumn()] if size else []
    return Progress(*columns, TextColumn("{task.fields[accepted]} accepted"), console=ERR, disable=not ERR.is_terminal)


def _print_summary(summary: SendSummary, seconds: float, *, as_json: bool) -> None:
    refused = sum(summary.refused.values())
    if as_json:
        examples = [
            {"position": position, "reason": reason, "detail": detail} for position, reason, detail in summary.examples
        ]
        result = {
            "accepted": summary.accepted,
            "refused": refused,
            "skipped": summary.skipped,
            "reasons": dict(summary.refused),
            "examples": examples,
        }
        typer.echo(json.dumps({**result, "retries": summary.retries, "seconds": round(seconds, 3)}))
        return
    skipped = f", skipped {summary.skipped}" if summary.skipped else ""
    print_note(
        f"accepted {summary.accepted}, refused {refused}{skipped}, retries {summary.retries}; "
        f"{seconds:.1f} s, {summary.accepted / max(seconds, 0.001):,.0f} events/s",
        "yellow" if refused or skipped else "green",
    )
    for reason, count in summary.refused.most_common():
        print_note(f"  refused {count}: {reason}", "yellow")
    if skipped:
        print_note(f"  skipped {summary.skipped}: no JSON objects, so they were not sent", "yellow")
    for position, reason, detail in summary.examples:
        print_note(f"    {summary.unit} {position}: {reason}: {detail}", "dim")
