"""How far a query has read: the offset that Spark keeps in its checkpoint, one for all topics of a query.

`{"topics": {name: {"incarnation": text, "next": {partition: offset}}}}`, offsets "next to read"; of Kinesis as text,
with more fields (`shards`). On the log, the batch that first reads a partition has `begun` for it, too. The incarnation tells a
topic that was deleted and created again from the one that the query read.

Also here: syncing a checkpoint. Worker processes import this file.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.core.broker.contract import PartitionRange
from services.core.broker.errors import OffsetOutOfRange, UnknownTopic

Offset = dict[str, Any]
UNBOUNDED = 1 << 62
"""The records of a micro-batch for which Spark sets no limit."""


class TopicRecreated(UnknownTopic):
    """The topic was deleted and created again since the query read it: its offsets mean other records now."""


def pack_offsets(
    topics: Mapping[str, tuple[str, Mapping[int, int]]], begun: Mapping[str, Mapping[int, int]] | None = None
) -> Offset:
    """topic -> (incarnation, next offset by partition). begun: as of `begun_in`."""
    packed: dict[str, Any] = {
        topic: {"incarnation": incarnation, "next": {str(p): following[p] for p in sorted(following)}}
        for topic, (incarnation, following) in sorted(topics.items())
    }
    for topic, first in (begun or {}).items():
        if first:
            packed[topic]["begun"] = {str(p): first[p] for p in sorted(first)}
    return {"topics": packed}


def offsets_of(offset: Offset, topic: str) -> tuple[str, dict[int, int]]:
    """(incarnation, next offset by partition) of a topic; ("", {}) for one that the query has not read yet."""
    found = offset["topics"].get(topic)
    return ("", {}) if found is None else (found["incarnation"], {int(p): int(n) for p, n in found["next"].items()})


def begun_in(offset: Offset, topic: str) -> dict[int, int]:
    """Where the batch of this offset begins in the partitions that it is the first to read."""
    return {int(p): int(n) for p, n in offset["topics"].get(topic, {}).get("begun", {}).items()}


def check_incarnation(topic: str, incarnation: str, known: str) -> None:
    """Raise TopicRecreated unless the topic is the one that was read, if any was."""
    if known and known != incarnation:
        raise TopicRecreated(
            f"topic {topic!r} was deleted and created again since the last batch. "
            "Try: moving the pipe's checkpoint folder away, and reading it from the start"
        )


def check_stored(
    topic: str, incarnation: str, known: tuple[str, Mapping[int, int]], stored: Mapping[int, PartitionRange]
) -> None:
    """Raise unless the topic is the one that was read and still holds everything from the known offsets on."""
    check_incarnation(topic, incarnation, known[0])
    for partition, wanted in known[1].items():
        part = stored.get(partition, PartitionRange(0, 0))
        if not part.start <= wanted <= part.end:
            raise OffsetOutOfRange(topic, partition, wanted, part.start, part.end)


def advance(known: Mapping[int, int], stored: Mapping[int, PartitionRange], room: int) -> dict[int, int]:
    """Next offsets after reading at most `room` records, shared evenly by the partitions that have some.

    Partitions with few records leave the rest of their share to the others. A new partition is read from its start.
    """
    following = {p: known.get(p, part.start) for p, part in stored.items()}
    waiting = sorted((stored[p].end - n, p) for p, n in following.items() if stored[p].end > n)
    while waiting:
        backlog, partition = waiting.pop(0)
        share = min(backlog, -(-room // (len(waiting) + 1)))
        following[partition] += share
        room -= share
    return following


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_batch(checkpoint: Path, batch: int) -> None:
    """Sync the files of this batch: its offsets, the state that it leaves, and the commit before it. Spark syncs nothing.

    Call it before anything of the batch becomes visible elsewhere. Otherwise, after a power cut, the output has a batch that the
    checkpoint does not know, and numbers are given twice.
    """
    notes = [f"offsets/{batch}", f"offsets/.{batch}.crc", f"commits/{batch - 1}", f"commits/.{batch - 1}.crc"]
    patterns = [*notes, *(f"state/**/{hidden}{batch + 1}{end}*" for hidden in ("", ".") for end in "._")]
    files = [path for pattern in patterns for path in checkpoint.glob(pattern)]
    for path in (*files, *{path.parent for path in files}):
        with contextlib.suppress(FileNotFoundError):  # Spark cleans up meanwhile
            sync(path)


def sync_before_commit(options: Mapping[str, str], batch: int) -> None:
    """`sync_batch` for a sink, when its checkpoint is a local folder."""
    checkpoint = options.get("checkpointlocation", "")
    if checkpoint.startswith("file://"):
        sync_batch(Path(checkpoint.removeprefix("file://")), batch)
