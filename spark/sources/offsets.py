"""How far a query has read: the offset that Spark keeps in its checkpoint, one for all topics of a query.

`{"topics": {name: {"incarnation": text, "next": {partition: offset}}}}`, offsets "next to read"; of Kinesis as text,
and more beside them (`shards`). The incarnation tells a topic that was deleted and made again from the one that the query read.
"""

from collections.abc import Mapping
from typing import Any

from services.core.broker.contract import PartitionRange
from services.core.broker.errors import OffsetOutOfRange, UnknownTopic

Offset = dict[str, Any]


class TopicRecreated(UnknownTopic):
    """The topic was deleted and made again since the query read it: its offsets mean other records now."""


def make_offset(places: Mapping[str, tuple[str, Mapping[int, int]]]) -> Offset:
    """topic -> (incarnation, next offset by partition)."""
    topics = {
        topic: {"incarnation": incarnation, "next": {str(p): following[p] for p in sorted(following)}}
        for topic, (incarnation, following) in sorted(places.items())
    }
    return {"topics": topics}


def place_of(offset: Offset, topic: str) -> tuple[str, dict[int, int]]:
    """(incarnation, next offset by partition) of a topic; ("", {}) for one that the query has not read yet."""
    found = offset["topics"].get(topic)
    return ("", {}) if found is None else (found["incarnation"], {int(p): int(n) for p, n in found["next"].items()})


def check_incarnation(topic: str, incarnation: str, known: str) -> None:
    """Raise TopicRecreated unless the topic is the one that was read, if any was."""
    if known and known != incarnation:
        raise TopicRecreated(
            f"topic {topic!r} was deleted and made again since the last batch. "
            "Try: moving the pipe's checkpoint folder away, and reading it from the start"
        )


def check_place(
    topic: str, incarnation: str, known: tuple[str, Mapping[int, int]], held: Mapping[int, PartitionRange]
) -> None:
    """Raise unless the topic is the one that was read and still holds everything from there on."""
    check_incarnation(topic, incarnation, known[0])
    for partition, wanted in known[1].items():
        part = held.get(partition, PartitionRange(0, 0))
        if not part.start <= wanted <= part.end:
            raise OffsetOutOfRange(topic, partition, wanted, part.start, part.end)


def advance(known: Mapping[int, int], held: Mapping[int, PartitionRange], room: int) -> dict[int, int]:
    """Next offsets after reading at most `room` records, shared evenly by the partitions that have some.

    Partitions with little give what they do not need to the others. A partition seen for the first time is read from
    its start.
    """
    following = {p: known.get(p, part.start) for p, part in held.items()}
    waiting = sorted((held[p].end - n, p) for p, n in following.items() if held[p].end > n)
    while waiting:
        backlog, partition = waiting.pop(0)
        share = min(backlog, -(-room // (len(waiting) + 1)))
        following[partition] += share
        room -= share
    return following
