"""What Spark builds on: a range is read whole, a batch is written once."""

import threading
from pathlib import Path

import pytest

from services.core.broker.contract import PartitionRange
from services.core.broker.errors import OffsetOutOfRange, RecordTooLarge, UnknownTopic
from services.core.broker.log import blocking
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.row_format import MAX_RECORD_BYTES
from services.core.broker.record import Record
from tests.unit.log.sample import TOPIC, make_topic, numbers, records


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A data folder with a topic of two partitions."""
    make_topic(tmp_path, partitions=2)
    return tmp_path


def test_append_once_and_read_range(path: Path) -> None:
    """If it fails, a Spark batch is doubled, cut, or reordered."""
    assert blocking.last_epoch(path, TOPIC, "job") is None
    assert blocking.append_once(path, TOPIC, "job", 0, {0: records(0, 3000), 1: records(5, 5)})
    assert not blocking.append_once(path, TOPIC, "job", 0, {0: records(0, 3000)})
    assert blocking.last_epoch(path, TOPIC, "job") == 0
    assert blocking.ends(path, TOPIC) == {0: PartitionRange(0, 3000), 1: PartitionRange(0, 5)}
    batches = list(blocking.read_range(path, TOPIC, 0, 17, 2901, max_records=100))
    assert [offset for batch in batches for offset in batch.offsets] == list(range(17, 2901))
    assert [int(r.value or b"") for batch in batches for r in batch.records] == list(range(17, 2901))
    assert max(len(batch.records) for batch in batches) <= 100


def test_a_range_that_does_not_exist_is_loud(path: Path) -> None:
    """If it fails, a Spark batch that planned more than there is goes on with less."""
    blocking.append_once(path, TOPIC, "job", 0, {0: records(0, 10)})
    with pytest.raises(OffsetOutOfRange):
        list(blocking.read_range(path, TOPIC, 0, 5, 11))
    with pytest.raises(UnknownTopic):
        list(blocking.read_range(path, TOPIC, 2, 0, 1))
    assert list(blocking.read_range(path, TOPIC, 0, 5, 5)) == []


def test_one_too_large_record_stores_nothing_of_the_batch(path: Path) -> None:
    """If it fails, a batch that is reported as failed has been stored in part, and is stored again later."""
    big = Record(None, b"x" * (MAX_RECORD_BYTES + 1), 1)
    with pytest.raises(RecordTooLarge):
        blocking.append_once(path, TOPIC, "job", 0, {0: [*records(0, 10), big]})
    assert numbers(DataFolder(path)) == []
    assert blocking.last_epoch(path, TOPIC, "job") is None


def test_two_drivers_with_the_same_epoch_store_it_once(path: Path) -> None:
    """If it fails, a zombie driver doubles a batch."""
    results: list[bool] = []

    def run() -> None:
        results.append(blocking.append_once(path, TOPIC, "job", 4, {0: records(0, 10)}))

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == [False] * 5 + [True]
    assert numbers(DataFolder(path)) == list(range(10))


def test_an_empty_batch_still_counts_as_written(path: Path) -> None:
    """If it fails, a batch without output is run again and again."""
    assert blocking.append_once(path, TOPIC, "job", 1, {})
    assert blocking.last_epoch(path, TOPIC, "job") == 1
