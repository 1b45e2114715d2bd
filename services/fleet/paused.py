"""The state of destinations for operators: running, paused or replaying, and the number of parked events."""

from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from services.core.broker.contract import Broker, PartitionRange, Reader
from services.core.broker.errors import UnknownTopic
from services.core.broker.reading import read_topic
from services.core.pauses import Pause, Pauses
from services.core.pipes import Destination, PipeFile, delivery_group, lane_name, parked_topic
from services.core.retry_state import PREFIX
from services.core.times import format_time
from services.fleet.console import make_table
from services.fleet.dead.view import plain
from services.fleet.problem import CommandFailed

_STYLES = {"running": "green", "paused": "red", "replaying": "yellow"}


@dataclass(frozen=True, slots=True)
class Target:
    """One destination and its state: running, paused, or replaying (ordered destinations: parked events are sent first)."""

    pipe: str
    destination: str
    state: str
    pause: Pause | None = None

    @property
    def lane(self) -> str:
        """Its name in the control topic."""
        return lane_name(self.pipe, self.destination)

    def as_json(self) -> dict[str, Any]:
        """Times in RFC 3339."""
        pause = pause_json(self.pause) if self.state == "paused" and self.pause is not None else {}
        return {"pipe": self.pipe, "destination": self.destination, "state": self.state, **pause}


def pause_json(pause: Pause) -> dict[str, str]:
    """A pause for a person or a program."""
    because = pause.detail or pause.reason
    return {"since": format_time(pause.at), "by": pause.by, "reason": pause.reason, "because": because}


def targets(pipes: PipeFile, pauses: Pauses) -> list[Target]:
    """Every webhook destination of the file. A stream destination cannot be paused."""
    return [
        _target(name, destination, pauses)
        for name, pipe in pipes.pipes.items()
        for destination in pipe.destinations
        if destination.webhook is not None
    ]


def _target(pipe: str, destination: Destination, pauses: Pauses) -> Target:
    found = pauses.of(lane_name(pipe, destination.name))
    if found is None:
        return Target(pipe, destination.name, "running")
    is_keyed = destination.webhook is not None and destination.webhook.order == "key"
    state = "paused" if found[1].state == "paused" else "replaying" if is_keyed else "running"
    return Target(pipe, destination.name, state, found[1])


def choose(known: list[Target], name: str, pipe: str | None) -> list[Target]:
    """The destinations of this name, in every pipe or in one. Raises CommandFailed when there is none."""
    chosen = [target for target in known if target.destination == name and pipe in (None, target.pipe)]
    if not chosen:
        where = "" if pipe is None else f" in the pipe {pipe}"
        names = ", ".join(target.lane for target in known) or "the pipe file has none"
        raise CommandFailed(f"no webhook destination {name}{where}", f"one of: {names}", status=2)
    return chosen


async def read_pauses(reader: Reader) -> Pauses:
    """The current pauses. Raises CommandFailed when the topic is missing, and BrokerError kinds."""
    pauses = Pauses(reader)
    try:
        await pauses.refresh()
    except UnknownTopic as error:
        raise CommandFailed(str(error), "penstock apply, which creates it") from error
    return pauses


async def count_parked(broker: Broker, pipe: str, destination: str) -> int:
    """The number of parked events of this destination. Reads all events that the pipe parked since the last replay."""
    topic, count = parked_topic(pipe), 0
    try:
        kept = await broker.reader.describe(topic)
    except UnknownTopic:
        return 0
    settled = await broker.admin.committed(delivery_group(pipe, destination), topic)
    for partition, held in kept.items():
        start = max(held.start, settled.get(partition, held.start - 1) + 1)
        async for batch in read_topic(broker.reader, topic, partition, PartitionRange(start, held.end)):
            count += sum(record.header(f"{PREFIX}destination") == destination.encode() for record in batch.records)
    return count


def describe(target: Target, parked: int) -> Text:
    """One line for a person."""
    words = Text(f"{target.lane} is ")
    words.append(target.state, style=_STYLES[target.state])
    if target.state == "paused" and target.pause is not None:
        words.append(plain(" since {since} by {by} because: {because}".format_map(pause_json(target.pause)), 400))
    if target.state != "running" or parked:
        words.append(f", {parked} events parked")
    return words


def target_table(found: list[tuple[Target, int]]) -> Table:
    """One row per destination."""
    table = make_table("destination", "state", "parked", "since", "by", "because", right=["parked"])
    for target, parked in found:
        row = {"since": "", "by": "", "because": "", **target.as_json()}
        texts = [Text(plain(row[name], 80)) for name in ("since", "by", "because")]
        table.add_row(target.lane, Text(target.state, style=_STYLES[target.state]), str(parked), *texts)
    return table
