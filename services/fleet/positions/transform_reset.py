"""Resets a transform. Spark keeps its position in a checkpoint, in the data folder. Without the checkpoint, the transform reads
its sources from the oldest event again, and writes as a new writer. After a reset to a time, the mark has the offset of that time
in each partition. The transform begins at this offset, or at the position of the former checkpoint if that comes first
(`spark/jobs/restart.py`).

The audit is written first, then the mark that the transform has begun is taken back, then the checkpoint gets another name: after
a crash in between, the same command does all again. Without a checkpoint here, the mark alone lets the transform begin again.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

from services.core.audit import RESET, write_moves
from services.core.broker.contract import Broker, Lag, PartitionRange
from services.core.broker.producer import Producer
from services.core.broker.record import TopicPartition
from services.core.control.transform_marks import Begin, TransformMark, write_transform_mark
from services.core.folders import sync_folder
from services.core.pipe_file.state_plan import StatePlan
from services.core.times import format_time
from services.fleet.positions.offsets import Move, PartitionOffsets, audited, count_events
from services.fleet.problem import CommandFailed

_IDENTITY = "penstock.json"
"""Without it, nobody knows of which topics the positions of a checkpoint are."""


@dataclass(frozen=True, slots=True)
class Restart:
    """moves: one for each partition, with the events from the new beginning to the end. since: the time of a reset to a time.
    begins: the offsets of that time, for the mark.

    older: the number of stored events before these offsets. If the former position is known, the transform also reads the older
    events that it has not read yet. So it may transform more events than the moves count.
    """

    moves: list[Move]
    since: datetime | None
    begins: dict[str, Begin]
    older: int = 0


async def plan_restart(broker: Broker, sources: Sequence[str], since: datetime | None = None) -> Restart:
    """Plan a restart at the oldest event of these streams, or at the first one since a time. broker: as of `open_own_broker`.

    Raises CommandFailed where a transform cannot begin at a time, and BrokerError kinds.
    """
    if since is not None and not broker.features.contiguous_offsets:
        raise CommandFailed("on Kinesis a transform cannot begin at a time", "--to-earliest", status=2)
    moves: list[Move] = []
    begins: dict[str, Begin] = {}
    for topic in sources:
        # First: the offsets of a topic that is made again meanwhile do not count as this one's.
        incarnation = await broker.admin.incarnation(topic)
        wanted = {} if since is None else await broker.reader.offsets_at(topic, since)
        found = {}
        for number, stored in sorted((await broker.reader.describe(topic)).items()):
            now = PartitionOffsets(TopicPartition(topic, number), stored, None, Lag(0, 0))
            to = found[number] = min(max(wanted.get(number, stored.start), stored.start), stored.end)
            moves.append(await count_events(broker, Move(now, to, PartitionRange(to, stored.end))))
        if since is not None:
            begins[topic] = Begin(incarnation, found)
    older = 0 if since is None else sum(move.to - move.now.stored.start for move in moves)
    return Restart(moves, since, begins, older)


async def record_restart(
    producer: Producer, pipe: str, restart: Restart, mark: TransformMark | None, who: str, former: str
) -> None:
    """Write the audit, then the mark that lets the transform begin without a checkpoint. former: the name, as of `find_former`.
    Raises BrokerError kinds.
    """
    about = {"transform": pipe}
    if (
        restart.since is not None
    ):  # the audit's ranges begin at this time; the transform begins earlier if its position comes first
        about |= {"since": time_text(restart.since)} | ({"or_position_of": former} if former else {})
    await write_moves(producer, RESET, who, about, audited(restart.moves))
    if restart.begins or former or (mark is not None and (mark.has_begun or mark.begins)):
        checkpoint, plan = ("", None) if mark is None else (mark.checkpoint, mark.plan)
        await write_transform_mark(producer, pipe, "reset", checkpoint, who, plan, begins=restart.begins, former=former)


def time_text(since: datetime) -> str:
    """RFC 3339."""
    return format_time(round(since.timestamp() * 1000))


def no_checkpoint(place: str, *, looked: bool) -> CommandFailed:
    """The error to raise when there is nothing to reset. place: the folder of the checkpoint, if there were one. looked: whether
    the command looked into this folder; it does not look into an object store."""
    return CommandFailed(
        f"{f'there is no checkpoint in {place}' if looked else f'{place} was not looked at'}, and the transform has not begun on "
        "this broker",
        "--data with the fleet's folder, or --broker with the broker's URL",
    )


@contextmanager
def lock_checkpoint(folder: Path | None) -> Iterator[bool]:
    """Keep the transform from starting. Gives whether the folder holds a checkpoint. A lock and claims alone are no checkpoint: a
    transform that was refused leaves them. If there is no folder, nothing keeps the transform from starting. folder: None if the
    checkpoints are in an object store. Blocking. Raises CommandFailed while the transform runs.
    """
    if folder is None or (lock := _open_lock(folder)) is None:
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
    """A file descriptor; None without the folder. A checkpoint from a backup has no lock yet."""
    try:
        lock = os.open(folder / "penstock.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if os.geteuid() == 0:  # else the fleet's user could not lock what root made here
            owner = folder.stat()
            os.fchown(lock, owner.st_uid, owner.st_gid)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CommandFailed(f"the checkpoint in {folder} cannot be locked: {error.strerror}") from error
    return lock


@dataclass(frozen=True, slots=True)
class Former:
    """The checkpoint with the position of the transform before this reset. name: the name of its folder after the reset; "" if
    there is no such checkpoint. path: the folder now; None if it is not on this machine."""

    name: str = ""
    path: Path | None = None


def find_former(folder: Path | None, aside: Path | None, mark: TransformMark | None, *, gives_up: bool) -> Former:
    """The checkpoint in the folder; else the former checkpoint that the mark names, from an earlier reset. folder: as in
    `lock_checkpoint`. aside: the path that the folder will get. gives_up: the position is not needed, so a checkpoint that is not
    here is forgotten. Blocking.
    """
    if folder is not None and aside is not None and (folder / _IDENTITY).exists():
        return Former(aside.name, folder)
    known = "" if mark is None else mark.former
    if folder is not None and known and ((path := folder.with_name(known)) / _IDENTITY).exists():
        return Former(known, path)
    return Former() if gives_up else Former(known)


class _Identity(msgspec.Struct):
    """The fields of `Identity` (`spark/jobs/checkpoint.py`) that decide whether a transform can begin at a time."""

    pipe: str
    state: str = ""
    plan: StatePlan | None = None
    penstock: str = ""


def check_former(path: Path, pipe: str) -> None:
    """Raise CommandFailed when its position cannot be used: the transform would be refused at its start. Blocking."""
    try:
        found = msgspec.json.decode((path / _IDENTITY).read_bytes(), type=_Identity)
    except (OSError, msgspec.DecodeError) as error:
        raise _not_at_a_time(f"{path / _IDENTITY} cannot be read: {error}") from error
    if found.pipe != pipe:
        raise _not_at_a_time(f"the checkpoint in {path} belongs to the pipe {found.pipe!r}")
    if found.state or found.plan is not None or (not found.penstock and (path / "state").exists()):
        raise keeps_state(pipe)


def keeps_state(pipe: str) -> CommandFailed:
    """The error to raise for a reset to a time."""
    return _not_at_a_time(f"the transform of {pipe} kept state over several events, which a reset to a time would lose")


def _not_at_a_time(problem: str) -> CommandFailed:
    return CommandFailed(problem, "--to-earliest", status=2)


def name_aside(folder: Path) -> Path:
    """The name that a checkpoint's folder will get. No pipe can have such a name."""
    return folder.with_name(f"{folder.name}.{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}")


def set_aside(folder: Path, aside: Path) -> None:
    """Rename a checkpoint, durably. Blocking. Raises OSError."""
    folder.rename(aside)
    sync_folder(folder.parent)
