"""The log for code without an event loop, such as Spark workers and drivers. Every function blocks and opens what it
needs for itself, so it may be called from any process of the host, also from a forked one.

Reading: `ends`, `read_range`. Writing: `append`; a whole batch once: `append_once`. Writing it from many
tasks: each task calls `stage`, the driver `commit_staged` with all tokens, and everything becomes visible in one transaction.
"""

import hashlib
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from zlib import crc32

import msgspec

from services.core.broker.contract import PartitionRange
from services.core.broker.errors import DataDamaged, OffsetOutOfRange
from services.core.broker.log.clock import WallClock
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.row_format import Packed, pack_all
from services.core.broker.log.sqlite_file import classified
from services.core.broker.log.topic_reader import TopicReader
from services.core.broker.log.topic_writer import Fence, TopicWriter
from services.core.broker.record import Batch, Record
from services.core.folders import make_folder, sync_folder

Parts = Mapping[int, Sequence[Record]]
"""Records by partition (`partitioner.choose_partition`), in the order to store them."""


def ends(path: str | Path, topic: str) -> dict[int, PartitionRange]:
    """The range of each partition now. Raises UnknownTopic, DataDamaged, Unavailable."""
    with TopicReader(DataFolder.prepare(path), topic) as reader:
        return reader.ranges()


def read_range(
    path: str | Path, topic: str, partition: int, start: int, end: int, *, max_records: int = 5_000
) -> Iterator[Batch]:
    """The records `start <= offset < end` of one partition, in order, in batches of at most max_records.

    Raises OffsetOutOfRange when some are gone or do not exist yet, DataDamaged naming exactly what is lost. Ranges that
    `repair` noted as lost are passed over: offsets jump. Holds the file open until exhausted or closed.
    """
    with TopicReader(DataFolder.prepare(path), topic) as reader:
        while start < end:
            run = reader.read(partition, start, min(max_records, end - start))
            if run is None:
                held = reader.ranges()[partition]
                raise OffsetOutOfRange(topic, partition, end, held.start, held.end)
            start = run.offset
            records = run.records[: max(0, end - start)]
            for first in range(0, len(records), max_records):
                some = records[first : first + max_records]
                yield Batch(topic, partition, range(start + first, start + first + len(some)), some)
            start += len(run.records)


def append(path: str | Path, topic: str, parts: Parts) -> None:
    """Store all records in one durable transaction; raises as `append_once`."""
    blocks = _pack(parts)
    with TopicWriter(DataFolder.prepare(path), topic, WallClock()) as log:
        log.append(blocks)


def append_once(path: str | Path, topic: str, writer: str, epoch: int, parts: Parts) -> bool:
    """Store all records in one durable transaction, unless this epoch of this writer was stored before (False).

    Raises UnknownTopic, RecordTooLarge, Unavailable, StorageFull, DataDamaged (nothing stored), OutcomeUnknown.
    """
    blocks = _pack(parts)
    with TopicWriter(DataFolder.prepare(path), topic, WallClock()) as log:
        return log.append(blocks, Fence(writer, epoch)) is not None


def last_epoch(path: str | Path, topic: str, writer: str) -> int | None:
    """The newest epoch that this writer stored, None before the first."""
    with TopicReader(DataFolder.prepare(path), topic) as reader:
        return reader.last_epoch(writer)


def stage(path: str | Path, topic: str, writer: str, epoch: int, parts: Parts) -> str:
    """Store one task's records durably but invisibly; gives the token for `commit_staged` or `abort_staged`."""
    folder = DataFolder.prepare(path)
    blocks = _pack(parts)
    with classified(topic):
        return write_blocks(folder, topic, writer, epoch, blocks)


def commit_staged(path: str | Path, topic: str, writer: str, epoch: int, tokens: Iterable[str]) -> bool:
    """Make all staged blocks visible in one durable transaction; False when this epoch was stored before.

    Per partition the records lie in the tokens' order. Removes the staged files of this and older epochs. The whole batch
    passes through memory once. Raises as `append_once`, and DataDamaged when a staged file is missing or altered.
    """
    folder = DataFolder.prepare(path)
    with classified(topic):
        blocks = read_blocks(folder, topic, tokens)
    if blocks is None:
        stored = last_epoch(path, topic, writer)
        if stored is not None and stored >= epoch:
            return False
        raise DataDamaged(topic, (), f"a staged block of epoch {epoch} is missing. Try: running the batch again")
    with TopicWriter(folder, topic, WallClock()) as log:
        done = log.append(blocks, Fence(writer, epoch)) is not None
    with classified(topic):
        remove_epochs(folder, topic, writer, epoch)
    return done


def abort_staged(path: str | Path, topic: str, tokens: Iterable[str]) -> None:
    """Remove staged blocks. Missing ones are ignored."""
    with classified(topic):
        remove_blocks(DataFolder.prepare(path), topic, tokens)


def _pack(parts: Parts) -> dict[int, list[Packed]]:
    return {partition: pack_all(records) for partition, records in parts.items() if records}


# Staged blocks: written by tasks, not yet committed by Spark's driver. One synced file per task attempt, named
# <hash of the writer>-<epoch>-<random>.block. The next commit of the writer removes files of older epochs; files of jobs that
# never came back are removed after a day.

KEEP_SECONDS = 24 * 3600

_Blocks = list[tuple[int, list[Packed]]]


def write_blocks(
    folder: DataFolder, topic: str, writer: str, epoch: int, blocks: Mapping[int, Sequence[Packed]]
) -> str:
    """Store the blocks durably, invisible; gives the token that `read_blocks` takes."""
    place = folder.staging(topic)
    make_folder(place, mode=0o700)
    token = f"{_prefix(writer)}{epoch}-{uuid.uuid4().hex}.block"
    body = msgspec.msgpack.encode(list(blocks.items()))
    draft = place / f".{token}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(crc32(body).to_bytes(4, "big") + body)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(place / token)
        sync_folder(place)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return token


def read_blocks(folder: DataFolder, topic: str, tokens: Iterable[str]) -> dict[int, list[Packed]] | None:
    """The blocks of all tokens by partition, in the tokens' order. None when a file is gone. Raises DataDamaged."""
    found: dict[int, list[Packed]] = {}
    for token in tokens:
        try:
            data = _path(folder, topic, token).read_bytes()
        except FileNotFoundError:
            return None
        if crc32(data[4:]).to_bytes(4, "big") != data[:4]:
            raise DataDamaged(topic, (), f"the staged block {token} is altered. Try: running the batch again")
        for partition, blocks in msgspec.msgpack.decode(data[4:], type=_Blocks):
            found.setdefault(partition, []).extend(blocks)
    return found


def remove_blocks(folder: DataFolder, topic: str, tokens: Iterable[str]) -> None:
    """Remove staged files. Missing ones are ignored."""
    for token in tokens:
        _path(folder, topic, token).unlink(missing_ok=True)


def remove_epochs(folder: DataFolder, topic: str, writer: str, epoch: int) -> None:
    """Remove everything this writer staged for this epoch or an older one."""
    prefix = _prefix(writer)
    for path in folder.staging(topic).glob(f"{prefix}*.block"):
        if int(path.name.removeprefix(prefix).split("-")[0]) <= epoch:
            path.unlink(missing_ok=True)


def remove_leftovers(folder: DataFolder) -> int:
    """Remove files that were staged more than a day ago; gives their number."""
    removed = 0
    for path in (folder.root / "staging").glob("*/*.block"):
        if time.time() - path.stat().st_mtime > KEEP_SECONDS:
            path.unlink(missing_ok=True)
            removed += 1
    return removed


def _prefix(writer: str) -> str:
    return hashlib.sha256(writer.encode()).hexdigest()[:16] + "-"


def _path(folder: DataFolder, topic: str, token: str) -> Path:
    if "/" in token or not token.endswith(".block"):
        raise ValueError(f"{token[:80]!r} is not a staging token")
    return folder.staging(topic) / token
