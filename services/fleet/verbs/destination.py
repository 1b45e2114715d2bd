"""`penstock destination`: show, pause and resume destinations."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.text import Text

from services.core.broker.producer import Producer
from services.core.control.pauses import OPERATOR, Pause, list_paused, write_pause
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import lane_name, renames_of
from services.core.process.scrape import Sample, scrape
from services.core.undelivered.causes import Causes
from services.core.units import format_count
from services.fleet.access import find_broker, find_fleet, find_pipes, load_found_pipes, opened
from services.fleet.console import ERR, OUT, print_note
from services.fleet.dead.audit import whoami
from services.fleet.dead.found import DeadLetterSearch, Filter
from services.fleet.dead.view import cause_table
from services.fleet.status.paused import (
    DestinationState,
    choose,
    count_parked,
    describe,
    destination_table,
    list_destinations,
    read_pauses,
    split_lane,
)
from services.fleet.status.reading import BREAKER_STATES
from services.fleet.verbs.app import APP, AsJson, BrokerUrl, Data, PipeName, Pipes, Since, Until, example, make_filter

DESTINATION = typer.Typer(help="Show, pause and resume destinations.", no_args_is_help=True)
APP.add_typer(DESTINATION, name="destination")

SHOWN, LIMIT = 20, 1000
_MEANING = {
    "half-open": "one request tests the receiver; its other events wait",
    "open": "too many requests failed; its events wait",
}


@dataclass(frozen=True, slots=True)
class Deliveries:
    """Of one lane, as the running processes of expel say it. breaker: the worst. requests: by outcome, since they started."""

    lane: str
    breaker: str
    requests: dict[str, int]

    def describe(self) -> str:
        """One line for a person."""
        meaning = ""
        if self.breaker != "closed":
            where = f"where: penstock group show {self.lane}; the next test: penstock status"
            meaning = f" ({_MEANING[self.breaker]}; {where})"
        counts = ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(self.requests.items())) or "none"
        return f"{self.lane}: circuit breaker {self.breaker}{meaning}; requests since expel started: {counts}"


def list_deliveries(sample: Sample, name: str, pipe: str | None) -> list[Deliveries]:
    """The lanes of this destination, in every pipe or in one, that a process of expel has."""
    breakers: dict[str, int] = {}
    for found, value in sample.children("penstock_expel_breaker_state", destination=name):
        if pipe in (None, found["pipe"]):
            breakers[found["pipe"]] = max(breakers.get(found["pipe"], 0), min(2, int(value)))
    return [
        Deliveries(lane_name(of_pipe, name), BREAKER_STATES[worst], _requests(sample, of_pipe, name))
        for of_pipe, worst in sorted(breakers.items())
    ]


def _requests(sample: Sample, pipe: str, destination: str) -> dict[str, int]:
    found = sample.children("penstock_expel_attempts_total", pipe=pipe, destination=destination)
    return {labels["outcome"]: int(value) for labels, value in found if value}


Name = Annotated[str, typer.Argument(help="The destination's name, or PIPE/DESTINATION.")]


@DESTINATION.command(
    epilog=example("penstock destination show billing\npenstock destination show billing --since 7d --json")
)
def show(
    name: Name,
    pipe: PipeName = None,
    since: Since = None,
    until: Until = None,
    everything: Annotated[bool, typer.Option("--all", help="Also redriven and discarded dead letters.")] = False,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Show whether a destination is paused, its dead letters by cause, and whether its receiver answers the running fleet.

    Events that wait are not dead letters: `penstock status` counts them, and `penstock group show` names their topics.
    """
    name, pipe = split_lane(name, pipe)
    where = make_filter(pipe, name, None, since, until, pipes=find_pipes(None, data))
    causes, paused = uvloop.run(_read_state(find_broker(broker, data), where, name, pipe, settled=everything))
    found = causes.most_common()
    state = find_fleet(data)
    is_there = state is not None and broker in (None, state.broker)
    expels = (
        [one.management for one in state.processes if one.service == "expel"] if state is not None and is_there else []
    )
    deliveries = list_deliveries(uvloop.run(scrape(expels)), name, pipe)
    if as_json:
        lists = {
            "paused": [one.as_json() for one in paused],
            "causes": [cause.as_json() for cause in found],
            "deliveries": [asdict(one) for one in deliveries],
        }
        typer.echo(json.dumps({"destination": name, "pipe": pipe, **lists}))
        return
    for one in paused:
        OUT.print(describe(one))
    for delivery in deliveries:
        OUT.print(Text(delivery.describe()))
    if found:
        OUT.print(cause_table(found[:SHOWN]))
    rest = f", {len(found) - SHOWN} of them not shown. Try: --json" if len(found) > SHOWN else ""
    count = format_count(sum(cause.count for cause in found), "dead letter")
    print_note(f"{count} for {name}, {format_count(len(found), 'cause')}{rest}")


async def _read_state(
    url: str, where: Filter, name: str, pipe: str | None, *, settled: bool
) -> tuple[Causes, list[DestinationState]]:
    causes = Causes(LIMIT)
    async with opened(url) as broker:
        async for page in (await DeadLetterSearch.open(broker, where, settled=settled)).pages():
            for letter in page:
                causes.add(letter)
        found = await list_paused(broker.reader, where.renames)
        paused = [(lane.partition("/"), pause) for lane, pause in found.items()]
        chosen = [
            DestinationState(of_pipe, name, "paused", pause)
            for (of_pipe, _, destination), pause in paused
            if destination == name and pipe in (None, of_pipe)
        ]
        return causes, await count_parked(broker, chosen, where.renames)


OfPipe = Annotated[str | None, typer.Option("--pipe", help="Only in this pipe. Default: in every pipe that has it.")]
ReasonText = Annotated[str, typer.Option("--reason", help="The reason, shown to other operators.")]
MAX_REASON = 500


@DESTINATION.command(epilog=example('penstock destination pause billing --reason "they move to a new data centre"'))
def pause(
    name: Name,
    pipe: OfPipe = None,
    reason: ReasonText = "",
    pipes: Pipes = None,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Send nothing to a destination until it is resumed. Its events are parked on disk without a time limit (Kinesis: a year).

    Every expel instance applies the pause within about a second. Requests in flight are finished.
    """
    path, who = find_pipes(pipes, data), whoami()
    new = Pause("paused", OPERATOR, who, time.time_ns() // 1_000_000, reason[:MAX_REASON])
    uvloop.run(
        _change(find_broker(broker, data), path, load_found_pipes(pipes, data), name, pipe, new, as_json=as_json)
    )


@DESTINATION.command(epilog=example("penstock destination resume billing"))
def resume(
    name: Name,
    pipe: OfPipe = None,
    pipes: Pipes = None,
    broker: BrokerUrl = None,
    data: Data = Path("data"),
    as_json: AsJson = False,
) -> None:
    """Resume a destination that an operator paused, or that answered 410. Sends the parked events; the rate rises slowly."""
    path, who = find_pipes(pipes, data), whoami()
    new = Pause("resumed", OPERATOR, who, time.time_ns() // 1_000_000)
    uvloop.run(
        _change(find_broker(broker, data), path, load_found_pipes(pipes, data), name, pipe, new, as_json=as_json)
    )


async def _change(
    url: str, path: Path, file: PipeFile, name: str, pipe: str | None, new: Pause, *, as_json: bool
) -> None:
    """Pause or resume. A destination that is already in that state stays unchanged. Raises CommandFailed."""
    async with opened(url) as broker, Producer(broker.appender) as producer:
        pauses = await read_pauses(broker.reader, file)
        changed = set[str]()
        for one in choose(list_destinations(file, pauses), name, pipe, path):
            if (one.state == "paused") != (new.state == "paused"):
                await write_pause(producer, one.lane, new)
                changed.add(one.lane)
        await pauses.refresh()
        chosen = choose(list_destinations(file, pauses), name, pipe, path)
        for one in await count_parked(broker, chosen, renames_of(file)):
            if as_json:
                typer.echo(json.dumps(one.as_json()))
            elif one.lane in changed and one.state != "paused":
                sent = f"; its {format_count(one.parked, 'parked event')} will be sent" if one.parked else ""
                ERR.print(f"{one.lane} is resumed{sent}")
            else:
                ERR.print(describe(one, already=one.lane not in changed))


@DESTINATION.command("list", epilog=example("penstock destination list\npenstock destination list --json | jq .state"))
def list_all(pipes: Pipes = None, broker: BrokerUrl = None, data: Data = Path("data"), as_json: AsJson = False) -> None:
    """List the webhook destinations and which of them are paused; --json prints one object per line.

    Needs no running fleet, so it does not show receivers that fail: use `penstock status`. The state `running` in --json means
    not paused.
    """
    file = load_found_pipes(pipes, data)
    found = uvloop.run(_list(find_broker(broker, data), file))
    if as_json:
        for one in found:
            typer.echo(json.dumps(one.as_json()))
    else:
        OUT.print(destination_table(found))


async def _list(url: str, file: PipeFile) -> list[DestinationState]:
    async with opened(url) as broker:
        found = list_destinations(file, await read_pauses(broker.reader, file))
        return await count_parked(broker, found, renames_of(file))
