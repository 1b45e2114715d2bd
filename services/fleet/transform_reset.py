"""Resets a transform. Spark keeps its position in a checkpoint, in the data folder. Without the checkpoint, the transform reads
its sources from the oldest event again, and writes as a new writer.

The audit is written first, then the mark that the transform has begun is taken back, then the checkpoint gets another name: after
a crash in between, the same command does all again. Without a checkpoint here, the mark alone lets the transform begin again.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from services.core.audit import RESET, write_moves
from services.core.broker.contract import Broker, Lag
from services.core.broker.producer import Producer
from services.core.broker.record import TopicPartition
from services.core.folders import sync_folder
from services.core.transform_marks import TransformMark, write_transform_mark
from services.fleet.offsets import Move, PartitionOffsets, audited, count_events
from services.fleet.problem import CommandFailed


async def plan_restart(broker: Broker, sources: Sequence[str]) -> list[Move]:
    """The moves of a transform that reads these streams from their oldest event again. Raises BrokerError kinds."""
    moves = []
    for topic in sources:
        for number, held in sorted((await broker.reader.describe(topic)).items()):
            now = PartitionOffsets(TopicPartition(topic, number), held, None, Lag(0, 0))
            moves.append(await count_events(broker, Move(now, held.start, held)))
    return moves


async def record_restart(
    producer: Producer, pipe: str, moves: Sequence[Move], mark: TransformMark | None, who: str
) -> None:
    """Write the audit, then take the mark back. Raises BrokerError kinds."""
    await write_moves(producer, RESET, who, {"transform": pipe}, audited(moves))
    if mark is not None and mark.has_begun:
        await write_transform_mark(producer, pipe, "reset", mark.checkpoint, who)


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
