"""The groups that an operator can move: of each destination, and of the global retrier."""

from dataclasses import dataclass

from services.core.broker.record import TopicPartition
from services.core.pipe_file.pipes import PipeFile, is_retried
from services.core.pipe_file.topic_names import (
    RETRIER_GROUP,
    RETRIER_TOPICS,
    delivery_group,
    delivery_topics,
    lane_name,
    parked_topic,
    retry_topic,
)
from services.core.undelivered.dead_letter import Position
from services.fleet.problem import CommandFailed, unknown_name


@dataclass(frozen=True, slots=True)
class Lane:
    """A destination of the pipe file, or the global retrier (`RETRIER`). topics: the streams, or the transform's output.

    retries: whether it uses the global retrier. waiting: the topics of waiting events that its group reads. They are moved by
    offset only, and only where they are named.
    """

    pipe: str
    destination: str
    topics: tuple[str, ...]
    retries: bool
    waiting: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """`pipe/destination`."""
        return lane_name(self.pipe, self.destination)

    @property
    def group(self) -> str:
        return delivery_group(self.pipe, self.destination)

    @property
    def stopped_by(self) -> str:
        """For an operator: how to stop every member of the group."""
        if self == RETRIER:
            return "stop the fleet, or every process of services.global_retrier, then the same command"
        return (
            "stop the fleet, or every process of services.expel that serves this pipe, then the same command. "
            "A paused destination stays in its group"
        )


_PIPE, _, _DESTINATION = RETRIER_GROUP.partition(".")
RETRIER = Lane(_PIPE, _DESTINATION, (), retries=False, waiting=RETRIER_TOPICS)
"""The group of the global retriers. No pipe can have its name."""


def find_lanes(file: PipeFile, name: str | None) -> list[Lane]:
    """The lanes that `name` selects: of a pipe, `pipe/destination`, `penstock/retrier`; None: of all destinations.

    Raises CommandFailed for an unknown one."""
    if name == RETRIER.name:
        return [RETRIER]
    known = [
        Lane(
            pipe,
            one.name,
            tuple(delivery_topics(pipe, found)),
            is_retried(one),
            (retry_topic(pipe), parked_topic(pipe)),
        )
        for pipe, found in file.pipes.items()
        for one in found.destinations
    ]
    chosen = [lane for lane in known if name in (None, lane.pipe, lane.name)]
    if not chosen:
        names = [lane.name for lane in known]
        raise unknown_name(f"there is no pipe or destination {name}", name or "", names, none="the pipe file has none")
    return chosen


def parse_offset(text: str, lane: Lane) -> tuple[TopicPartition, int]:
    """From `partition:offset`, or `topic:partition:offset` where the group reads several topics. Raises CommandFailed."""
    topic = next(iter(lane.topics or lane.waiting))
    has_topic = text.count(":") > 1
    try:
        found = Position.parse(text if has_topic else f"{topic}:{text}")
    except ValueError:
        example = "0:4712" if len(lane.topics) == 1 else f"{topic}:0:4712"
        raise CommandFailed(
            f"--to-offset {text[:80]!r} names no offset", f"PARTITION:OFFSET, e.g. {example}", status=2
        ) from None
    if found.topic not in (*lane.topics, *lane.waiting):
        names = ", ".join((*lane.topics, *lane.waiting))
        raise CommandFailed(f"{lane.name} does not read {found.topic}", f"one of: {names}", status=2)
    if not has_topic and len(lane.topics) != 1:
        names = ", ".join(lane.topics or lane.waiting)
        what = "streams" if lane.topics else "topics"
        raise CommandFailed(f"{lane.name} reads several {what}: {names}", f"--to-offset {topic}:{text}", status=2)
    return TopicPartition(found.topic, found.partition), found.offset
