"""Resets a transform. Spark keeps its position in a checkpoint, in the data folder. Without the checkpoint, the transform reads
its sources from the oldest event again, and writes as a new writer.

The audit is written first, then the checkpoint gets another name: after a crash in between, the same command does both again.
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


async def record_restart(producer: Producer, pipe: str, moves: Sequence[Move], who: str) -> None:
    """Write the audit. Raises BrokerError kinds."""
    await write_moves(producer, RESET, who, {"transform": pipe}, audited(moves))


@contextmanager
def hold_checkpoint(folder: Path) -> Iterator[None]:
    """Keep the transform from starting. Blocking. Raises CommandFailed while it runs, or when the folder holds no checkpoint."""
    try:
        lock = os.open(folder / "penstock.lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise CommandFailed(
            f"there is no checkpoint in {folder}: {error.strerror}",
            "--data with the fleet's folder; a checkpoint elsewhere: docs/transforms.md",
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandFailed(
                f"the transform of {folder.name} runs", "stop the fleet, then the same command"
            ) from None
        yield
    finally:
        os.close(lock)


def set_aside(folder: Path) -> Path:
    """Rename a checkpoint, durably. Gives its new name, which no pipe can have. Blocking. Raises OSError."""
    aside = folder.with_name(f"{folder.name}.{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")
    folder.rename(aside)
    sync_folder(folder.parent)
    return aside
