"""A small damaged log, and the oracle: what was stored is known, so nothing may be missing without a word."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import BrokerError, DataDamaged
from services.core.broker.log import topics
from services.core.broker.log.clock import WallClock
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.row_format import pack_all
from services.core.broker.log.topic_reader import TopicReader
from services.core.broker.log.topic_writer import TopicWriter
from services.core.broker.record import Record

TOPIC = "orders"
PARTITIONS = 2
BATCHES = 12
BATCH = 5
END = BATCHES * BATCH


def stored(partition: int, offset: int) -> bytes:
    """The value that was stored at this place."""
    return (b"%d:%d;" % (partition, offset)).ljust(700, b".")


def make_crashed(folder: Path, *, checkpoint_after: int) -> Path:
    """A data folder as a crash leaves it: the first batches in the database, the rest in the write-ahead log."""
    live = DataFolder.prepare(folder / "live")
    topics.create_topic(live, TopicSpec(TOPIC, partitions=PARTITIONS))
    with TopicWriter(live, TOPIC, WallClock()) as writer:
        for batch in range(BATCHES):
            first = batch * BATCH
            for partition in range(PARTITIONS):
                records = [Record(b"k", stored(partition, n), 1000 + n) for n in range(first, first + BATCH)]
                writer.append({partition: pack_all(records)})
            if batch + 1 == checkpoint_after:
                writer.checkpoint()
        crashed = folder / "crashed"
        copy_folder(live.root, crashed)
    return crashed


def copy_folder(source: Path, target: Path) -> None:
    """Copy a data folder without SQLite's shared memory, as a reboot leaves it."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*-shm"))


def read_everything(folder: Path) -> dict[int, list[bytes]]:
    """Every record of every partition through the reader, as a consumer gets them. Raises what the reader raises."""
    found: dict[int, list[bytes]] = {}
    with TopicReader(DataFolder(folder), TOPIC) as reader:
        for partition, held in reader.ranges().items():
            offset, values = held.start, []
            assert held.start == 0, "records vanished from the beginning"
            while (run := reader.read(partition, offset, 7)) is not None:
                assert list(run.offsets) == list(range(offset, run.next)), "offsets were passed over"
                values += [record.value or b"" for record in run.records]
                offset = run.next
            found[partition] = values
    return found


def check_never_silent(folder: Path) -> str:
    """ "whole" when everything can be read, "loud" when reading says that it cannot. Anything else fails."""
    try:
        found = read_everything(folder)
    except BrokerError as error:
        check_ranges(error)
        return "loud"
    expected = {p: [stored(p, n) for n in range(END)] for p in range(PARTITIONS)}
    assert found == expected, "records are missing or altered, and nobody said so"
    return "whole"


def check_ranges(error: BrokerError) -> None:
    """A named range lies within what was stored."""
    if isinstance(error, DataDamaged):
        for partition, first, last in error.ranges:
            assert 0 <= partition < PARTITIONS
            assert 0 <= first <= last < END


def flip(path: Path, position: int, bit: int) -> None:
    """Change one bit."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def truncate(path: Path, size: int) -> None:
    """Cut the file off."""
    path.write_bytes(path.read_bytes()[:size])


def positions(size: int, step: int, *, head: int = 0) -> Iterator[int]:
    """Every byte of the first `head`, then one in `step`, never the same place within a page twice in a row."""
    yield from range(min(head, size))
    yield from range(head, size, step)
