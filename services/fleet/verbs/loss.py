"""`penstock loss`: the missing events of each minute, counted and by name."""

import json
import time
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer
import uvloop
from rich.table import Table
from rich.text import Text

from services.core.ledger.minute import MINUTE_MS
from services.core.pipe_file.topic_names import is_of_retrier
from services.core.times import format_time, parse_time
from services.core.units import format_count
from services.fleet.console import OUT, make_table, print_note
from services.fleet.observer_client import describe_results, find_observer, get_json, loss_table, outcome_table
from services.fleet.verbs.app import APP, AsJson, Data, ObserverAddress, ObserverToken, example

LOSS = typer.Typer(help="The missing events of each minute, counted and by name.", no_args_is_help=True)
APP.add_typer(LOSS, name="loss")

PipeArgument = Annotated[str, typer.Argument(help="The pipe's name.")]
SHOWN = 50
_MINUTES = (
    "An event counts in the minute of its own time. If it arrived before that minute, or more than a minute after its end, it "
    "counts in the minute of its arrival. A minute without events has no row. "
    "A minute is final 150 s after its end at the earliest (final_after): until then late events may arrive."
)


@LOSS.command(epilog=example("penstock loss show punctuality\npenstock loss show punctuality --from 3h --json"))
def show(
    pipe: PipeArgument,
    since: Annotated[str | None, typer.Option("--from", help="First minute: 3h (ago), or an RFC 3339 time.")] = None,
    until: Annotated[str | None, typer.Option("--to", help="Last minute. Default: this one.")] = None,
    observer: ObserverAddress = None,
    token_file: ObserverToken = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Show the missing events of a pipe, by minute and by the step that did not settle them; then the outcomes at each step."""
    query = {name: value for name, value in (("from", since), ("to", until)) if value is not None}
    body = uvloop.run(
        get_json(find_observer(observer, data, token_file), f"/v1/pipes/{quote(pipe, safe='')}/loss", query)
    )
    if as_json:
        typer.echo(json.dumps(body))
        return
    if body["minutes"]:
        OUT.print(loss_table(body))
        OUT.print(outcome_table(body))
        if (results := describe_results(body)) is not None:
            print_note(results)
    _print_gaps(body)
    print_note(_sum_up(pipe, body, round(time.time() * 1000)))
    print_note(_MINUTES, "dim")


@LOSS.command(epilog=example("penstock loss explain punctuality 2026-11-21T08:05Z"))
def explain(
    pipe: PipeArgument,
    minute: Annotated[str, typer.Argument(help="A minute from `penstock loss show`, or 5m (ago).")],
    observer: ObserverAddress = None,
    token_file: ObserverToken = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """List the missing events of a minute: id, the last node that reported it, and its offset there."""
    path, where = f"/v1/pipes/{quote(pipe, safe='')}/loss", find_observer(observer, data, token_file)
    body = uvloop.run(get_json(where, f"{path}/{quote(minute, safe='')}/explain", {}))
    if as_json:
        typer.echo(json.dumps(body))
        return
    named = body["named"]
    if named:
        OUT.print(missing_table(named[:SHOWN]))
    _print_gaps(body)
    if not body["complete"]:
        print_note(f"Only {body['records_read']} records were read; some positions may be unknown.", "yellow")
    if any(_waited_unseen(one) for one in named):
        print_note(
            "For a waiting event that is not found in the retrier's topics, the source position is shown.",
            "yellow",
        )
    more = f", {len(named) - SHOWN} of them not shown. Try: --json" if len(named) > SHOWN else ""
    now = uvloop.run(get_json(where, path, {"from": body["minute"], "to": body["minute"]}))
    is_open = any(not step["final"] for row in now["minutes"] for step in row["steps"])
    so_far = " so far: the minute is not final, and they may still arrive" if is_open else ""
    print_note(f"{body['missing']} events of {body['minute']} are missing in {pipe}{so_far}{more}")


def missing_table(named: list[dict[str, Any]]) -> Table:
    """One row per missing event of the answer to `/explain`."""
    table = make_table("event", "missing at", "last seen by", "where (topic:partition:offset)", "origin")
    for one in named:
        step = one["missing_at"] + (f" to {one['destination']}" if one["destination"] else "")
        where = "not found" if one["topic"] is None else f"{one['topic']}:{one['partition']}:{one['offset']}"
        event = Text(ascii(one["event_id"] or "")[1:-1])
        table.add_row(event, Text(step, style="red"), one["seen_by"], where, one["origin"])
    return table


def _waited_unseen(one: dict[str, Any]) -> bool:
    """Whether the shown position is the source of a waiting event, not the record in which it waited."""
    waited = "retrier" in (one["missing_at"], one["seen_by"])
    return waited and one["topic"] is not None and not is_of_retrier(one["topic"])


def _sum_up(pipe: str, body: dict[str, Any], now_ms: int) -> str:
    """The number of missing events, as far as it is known: a minute that is not final for a destination has none there yet."""
    rows = body["minutes"]
    accepted = format_count(sum(row["accepted"] for row in rows), "event")
    minutes = format_count(len(rows), "minute")
    steps = [step for row in rows for step in row["steps"]]
    names = sorted({step["destination"] for step in steps if not step["final"] and step["destination"] is not None})
    missing = f"{sum(row['lost'] for row in rows)} of {accepted} are missing in {minutes} of {pipe}"
    if not names:
        return f"{missing}; all minutes are final"
    again = _when_final(body, now_ms)
    if not any(step["final"] for step in steps):
        none = "None of the minutes is final yet, so which of the events are missing is not known."
        return f"{accepted} accepted in {minutes} of {pipe}. {none} {again}"
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    rest = f"The rest is not final for {shown} yet: its missing events may still arrive, and do not count."
    return f"{missing}. Final: {sum(row['final'] for row in rows)} of {minutes}. {rest} {again}"


def _when_final(body: dict[str, Any], now_ms: int) -> str:
    """When the newest open minute may be final. Once this time is past, something else holds it, which the table names."""
    newest = max(parse_time(row["minute"], now_ms / 1000) for row in body["minutes"] if not row["final"])
    final_ms = newest + MINUTE_MS + body.get("final_after_ms", 0)  # an older observer does not say
    if final_ms <= now_ms:
        return "The column `state` says why."
    return f"Try: the same again after {format_time(final_ms)[:19]}Z"


def _print_gaps(body: dict[str, Any]) -> None:
    if body["catching_up"]:
        print_note("The observer is catching up: these figures are not final.", "yellow")
    if body["problem"]:
        print_note(f"The observer cannot read the reports: {body['problem']}", "yellow")
