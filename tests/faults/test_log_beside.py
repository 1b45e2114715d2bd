"""Everything at once on one topic: appends, reads, retention, growth, checks. Nothing may look lost that is not."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import OffsetOutOfRange
from services.core.broker.log import retention, topics
from services.core.broker.log.clock import WallClock
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.repair import verify_topic
from services.core.broker.log.row_format import pack_all
from services.core.broker.log.topic_reader import TopicReader
from services.core.broker.log.topic_writer import TopicWriter
from services.core.broker.record import Record

TOPIC = "orders"
SECONDS = 2.0


def write_many(folder: DataFolder) -> None:
    """Twenty transactions of random size."""
    chance = random.Random(time.monotonic_ns())
    with TopicWriter(folder, TOPIC, WallClock()) as writer:
        for _ in range(20):
            items = [Record(None, b"x" * chance.randrange(2000), 1)] * chance.randrange(1, 20)
            writer.append({chance.randrange(2): pack_all(items)})
            if writer.is_checkpoint_due:
                writer.checkpoint()


def trim(folder: DataFolder) -> None:
    """Retention."""
    retention.enforce(folder, TOPIC, WallClock().now_ms())


def check(folder: DataFolder) -> None:
    """A full scan."""
    report = verify_topic(folder, TOPIC)
    assert report.is_sound, report


def read_on(folder: DataFolder) -> None:
    """Read from the start until the end, or until retention overtakes."""
    with TopicReader(folder, TOPIC) as reader:
        offset = reader.ranges()[0].start
        with suppress(OffsetOutOfRange):
            while (run := reader.read(0, offset, 10)) is not None:
                assert list(run.offsets) == list(range(offset, run.next))
                offset = run.next


def test_checks_and_readers_beside_writers_and_retention(tmp_path: Path) -> None:
    """If it fails, a healthy fleet raises alarms about lost events, or a reader skips some beside retention."""
    folder = DataFolder.prepare(tmp_path)
    topics.create_topic(folder, TopicSpec(TOPIC, partitions=2, retention_bytes=100_000))
    stop = time.monotonic() + SECONDS
    faults: list[BaseException] = []
    done: Counter[str] = Counter()

    def repeat(work: Callable[[DataFolder], None]) -> None:
        try:
            while True:
                work(folder)
                done[work.__name__] += 1
                if time.monotonic() >= stop:
                    return
        except BaseException as error:  # the test's thread raises it
            faults.append(error)

    threads = [threading.Thread(target=repeat, args=(work,)) for work in (write_many, write_many, trim, check, read_on)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    assert len(done) == 4, done
