"""Resets a transform. Spark keeps its position in a checkpoint, in the data folder. Without the checkpoint, the transform reads
its sources from the oldest event again, or from the offsets in the mark, and writes as a new writer.

The audit is written first, then the mark that the transform has begun is taken back, then the checkpoint gets another name: after
a crash in between, the same command does all again. Without a checkpoint here, the mark alone lets the transform begin again.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from services.core.audit import RESET, write_moves
from services.core.broker.contract import Broker, Lag, PartitionRange
from services.core.broker.producer import Producer
from services.core.broker.record import TopicPartition
from services.core.folders import sync_folder
from services.core.transform_marks import Begin, TransformMark, write_transform_mark
from services.fleet.offsets import Move, PartitionOffsets, audited, count_events
from services.fleet.problem import CommandFailed


async def plan_restart(broker: Broker, sources: Sequence[str], since: datetime | None = None) -> list[Move]:
    """The moves of a transform that reads these streams again, from their oldest event or from the first one since a time.

    Raises CommandFailed where a transform cannot begin at a time, and BrokerError kinds.
    """
    if since is not None and not broker.features.contiguous_offsets:
        raise CommandFailed("on Kinesis a transform cannot begin at a time", "--to-earliest", status=2)
    moves = []
    for topic in sources:
        begins = {} if since is None else await broker.reader.offsets_at(topic, since)
        for number, held in sorted((await broker.reader.describe(topic)).items()):
            now = PartitionOffsets(TopicPartition(topic, number), held, None, Lag(0, 0))
            to = min(max(begins.get(number, held.start), held.start), held.end)
            moves.append(await count_events(broker, Move(now, to, PartitionRange(to, held.end))))
    return moves


async def record_restart(
    broker: Broker,
    producer: Producer,
    pipe: str,
    moves: Sequence[Move],
    mark: TransformMark | None,
    who: str,
    *,
    dated: bool,
) -> None:
    """Write the audit, then the mark: without a checkpoint the transform begins again, where the moves end if dated. Raises
    BrokerError kinds.
    """
    begins: dict[str, Begin] = {}
    for topic in dict.fromkeys(move.now.source.topic for move in moves) if dated else ():
        offsets = {move.now.source.partition: move.to for move in moves if move.now.source.topic == topic}
        begins[topic] = Begin(await broker.admin.incarnation(topic), offsets)
    await write_moves(producer, RESET, who, {"transform": pipe}, audited(moves))
    if begins or (mark is not None and (mark.has_begun or mark.begins)):
        await write_transform_mark(producer, pipe, "reset", "" if mark is None else mark.checkpoint, who, begins=begins)


def no_checkpoint(folder: Path) -> CommandFailed:
    """The error to raise when there is nothing to reset."""
    return CommandFailed(
        f"there is no checkpoint in {folder}, and the transform has not begun on this broker",
        "--data with the fleet's folder, or --broker with the broker's URL",
    )


@contextmanager
def hold_checkpoint(folder: Path) -> Iterator[bool]:
    """Keep the transform from starting. Gives whether the folder holds a checkpoint; a transform that was refused leaves
    its lock and its claim. Without the folder nothing is kept. Blocking. Raises CommandFailed while the transform runs.
    """
    if (lock := _open_lock(folder)) is None:
        yield False
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandFailed(
                f"the transform of {folder.name} runs", "stop the fleet, then the same command"
            ) from None
        yield any(path.name not in ("penstock.lock", "claims") for path in folder.iterdir())
    finally:
        os.close(lock)


def _open_lock(folder: Path) -> int | None:
    """A file descriptor; None without a folder that a transform made."""
    try:
        return os.open(folder / "penstock.lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CommandFailed(f"the checkpoint in {folder} cannot be locked: {error.strerror}") from error


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint, durably. Gives its new name, which no pipe can have. Blocking. Raises OSError."""
    aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    folder.rename(aside)
    sync_folder(folder.parent)
    return aside
