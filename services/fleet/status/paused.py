"""The state of destinations for operators: running, paused or replaying, and the number of parked events."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from services.core.broker.contract import Broker, PartitionRange, Reader
from services.core.broker.errors import UnknownTopic
from services.core.broker.reading import read_topic
from services.core.control.pauses import Pause, Pauses
from services.core.pipe_file.pipes import Destination, PipeFile
from services.core.pipe_file.snapshot import original_of
from services.core.pipe_file.topic_names import delivery_group, lane_name, parked_topic, renames_of
from services.core.times import format_time
from services.core.undelivered.waiting import lane_of
from services.fleet.console import make_table
from services.fleet.dead.view import plain
from services.fleet.problem import CommandFailed, unknown_name

_STYLES = {"running": "", "paused": "red", "replaying": "yellow"}


@dataclass(frozen=True, slots=True)
class DestinationState:
    """state: running (not paused; whether it works is not known here), paused, or replaying (an ordered destination sends its
    parked events first). pause: while it is paused."""

    pipe: str
    destination: str
    state: str
    pause: Pause | None = None
    parked: int = 0

    @property
    def lane(self) -> str:
        """Its name in the control topic."""
        return lane_name(self.pipe, self.destination)

    @property
    def shown_state(self) -> Text:
        """For a person."""
        return Text("not paused" if self.state == "running" else self.state, style=_STYLES[self.state])

    def as_json(self) -> dict[str, Any]:
        """Times in RFC 3339."""
        pause = {} if self.pause is None else pause_json(self.pause)
        return {
            "pipe": self.pipe,
            "destination": self.destination,
            "state": self.state,
            **pause,
            "parked": self.parked,
        }


def pause_json(pause: Pause) -> dict[str, str]:
    """A pause for a person or a program."""
    return {"since": format_time(pause.at), "by": pause.by, "reason": pause.reason, "because": pause.because}


def list_destinations(pipes: PipeFile, pauses: Pauses) -> list[DestinationState]:
    """Every webhook destination of the file, without the number of parked events. A stream destination cannot be paused."""
    return [
        _state_of(name, destination, pauses)
        for name, pipe in pipes.pipes.items()
        for destination in pipe.destinations
        if destination.webhook is not None
    ]


def _state_of(pipe: str, destination: Destination, pauses: Pauses) -> DestinationState:
    found = pauses.of(lane_name(pipe, destination.name))
    if found is not None and found[1].state == "paused":
        return DestinationState(pipe, destination.name, "paused", found[1])
    is_keyed = destination.webhook is not None and destination.webhook.order == "key"
    return DestinationState(pipe, destination.name, "replaying" if found is not None and is_keyed else "running")


def split_lane(name: str, pipe: str | None) -> tuple[str, str | None]:
    """The destination and its pipe, where a person may write `PIPE/DESTINATION`, as it is shown, in place of the name."""
    of_pipe, _, destination = name.partition("/")
    return (destination, of_pipe) if destination and pipe is None else (name, pipe)


def describe_file(path: Path) -> str:
    """The pipe file for a person: a fleet runs on a snapshot of it."""
    original = original_of(path)
    return str(path) if original is None else f"{original}, as it was when the fleet started,"


def choose(known: list[DestinationState], name: str, pipe: str | None, path: Path) -> list[DestinationState]:
    """The destinations of this name, in every pipe or in one. path: of the pipe file. Raises CommandFailed when there is none."""
    name, pipe = split_lane(name, pipe)
    chosen = [one for one in known if one.destination == name and pipe in (None, one.pipe)]
    if not chosen:
        where = "" if pipe is None else f" in the pipe {pipe}"
        full = name if pipe is None else lane_name(pipe, name)
        lanes = [one.lane for one in known]
        meant = lanes if pipe is not None else [one.destination for one in known]
        text = f"{describe_file(path)} has no webhook destination {name}{where}"
        raise unknown_name(text, full, lanes, meant, none="the pipe file has none")
    return chosen


async def read_pauses(reader: Reader, pipes: PipeFile | None = None) -> Pauses:
    """The current pauses. pipes: has the former names of destinations.

    Raises CommandFailed when the topic is missing, and BrokerError kinds.
    """
    pauses = Pauses(reader, None if pipes is None else renames_of(pipes))
    try:
        await pauses.refresh()
    except UnknownTopic as error:
        raise CommandFailed(str(error), "penstock apply, which creates it") from error
    return pauses


async def count_parked(
    broker: Broker, found: list[DestinationState], renames: Mapping[str, str]
) -> list[DestinationState]:
    """Add the number of parked events. Reads all events that the pipe parked since the last replay.

    renames: as in `Pauses`. Expel takes the events of a former name over when it starts; until then they count, too.
    """
    return [
        replace(
            one,
            parked=sum(
                [
                    await _count_parked(broker, *lane.split("/"))
                    for lane in (one.lane, *(old for old, new in renames.items() if new == one.lane))
                ]
            ),
        )
        for one in found
    ]


async def _count_parked(broker: Broker, pipe: str, destination: str) -> int:
    topic, count = parked_topic(pipe), 0
    try:
        kept = await broker.reader.describe(topic)
    except UnknownTopic:
        return 0
    settled = await broker.admin.committed(delivery_group(pipe, destination), topic)
    for partition, stored in kept.items():
        start = max(stored.start, settled.get(partition, stored.start - 1) + 1)
        async for batch in read_topic(broker.reader, topic, partition, PartitionRange(start, stored.end)):
            count += sum(lane_of(record) == lane_name(pipe, destination) for record in batch.records)
    return count


def describe(found: DestinationState, *, already: bool = False) -> Text:
    """One line for a person. already: a command found this state."""
    words = Text(f"{found.lane} is {'already ' if already and found.state != 'running' else ''}")
    words.append_text(found.shown_state)
    if found.pause is not None:
        words.append(plain(" since {since} by {by} because: {because}".format_map(pause_json(found.pause)), 400))
    if found.state != "running" or found.parked:
        words.append(f", {found.parked} events parked")
    return words


def destination_table(found: list[DestinationState]) -> Table:
    columns = ("destination", "state", "parked", "since", "by", "because")
    table = make_table(*columns, right=["parked"], text=["because"])
    for one in found:
        row = one.as_json()
        texts = [Text(plain(row.get(name, ""), 200)) for name in ("since", "by", "because")]
        table.add_row(one.lane, one.shown_state, str(one.parked), *texts)
    return table
