"""What Spark stands on: a range is read whole, a batch is written once, staged blocks appear together or not at all."""

import os
import threading
import time
from pathlib import Path

import pytest

from services.core.broker.contract import PartitionRange
from services.core.broker.errors import DataDamaged, OffsetOutOfRange, RecordTooLarge, UnknownTopic
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


def staged_files(path: Path) -> list[str]:
    """What lies in the staging folder."""
    return sorted(file.name for file in (path / "staging" / TOPIC).glob("*"))


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


def test_staged_blocks_appear_together_and_only_once(path: Path) -> None:
    """If it fails, readers see half of a batch, or a failed attempt's records beside the good ones."""
    tokens = [blocking.stage(path, TOPIC, "job", 1, {n % 2: records(n * 10, 10)}) for n in range(4)]
    zombie = blocking.stage(path, TOPIC, "job", 1, {0: records(900, 10)})
    assert numbers(DataFolder(path)) == []
    assert blocking.commit_staged(path, TOPIC, "job", 1, tokens)
    assert numbers(DataFolder(path), 0) == [*range(10), *range(20, 30)]
    assert numbers(DataFolder(path), 1) == [*range(10, 20), *range(30, 40)]
    assert staged_files(path) == [], f"{zombie} is a leftover"
    assert not blocking.commit_staged(path, TOPIC, "job", 1, tokens), "a driver that asks again gets no second copy"
    assert numbers(DataFolder(path), 0) == [*range(10), *range(20, 30)]


def test_an_empty_batch_still_counts_as_written(path: Path) -> None:
    """If it fails, a batch without output is run again and again."""
    assert blocking.commit_staged(path, TOPIC, "job", 1, [])
    assert blocking.last_epoch(path, TOPIC, "job") == 1


def test_a_commit_keeps_what_others_and_later_epochs_staged(path: Path) -> None:
    """If it fails, one query's commit deletes another query's work."""
    mine = blocking.stage(path, TOPIC, "job", 1, {0: records(0, 1)})
    later = blocking.stage(path, TOPIC, "job", 2, {0: records(1, 1)})
    other = blocking.stage(path, TOPIC, "other", 1, {0: records(2, 1)})
    blocking.commit_staged(path, TOPIC, "job", 1, [mine])
    assert staged_files(path) == sorted([later, other])
    blocking.abort_staged(path, TOPIC, [later, other, mine])
    assert staged_files(path) == []


def test_missing_or_altered_staged_blocks_are_loud(path: Path) -> None:
    """If it fails, a batch is committed without some of its records."""
    tokens = [blocking.stage(path, TOPIC, "job", 1, {0: records(n, 1)}) for n in range(2)]
    file = path / "staging" / TOPIC / tokens[0]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(DataDamaged, match="altered"):
        blocking.commit_staged(path, TOPIC, "job", 1, tokens)
    file.write_bytes(b"")
    with pytest.raises(DataDamaged, match="altered"):
        blocking.commit_staged(path, TOPIC, "job", 1, tokens)
    file.unlink()
    with pytest.raises(DataDamaged, match="missing"):
        blocking.commit_staged(path, TOPIC, "job", 1, tokens)
    assert numbers(DataFolder(path)) == []


def test_tokens_cannot_leave_the_staging_folder(path: Path) -> None:
    """If it fails, a token names any file."""
    with pytest.raises(ValueError, match="token"):
        blocking.commit_staged(path, TOPIC, "job", 1, ["../../topics/orders.db"])
    with pytest.raises(ValueError, match="token"):
        blocking.abort_staged(path, TOPIC, [".hidden"])


def test_what_dead_jobs_staged_goes_after_a_day(path: Path) -> None:
    """If it fails, crashed jobs fill the disk."""
    old = blocking.stage(path, TOPIC, "dead", 1, {0: records(0, 1)})
    new = blocking.stage(path, TOPIC, "job", 1, {0: records(0, 1)})
    draft = path / "staging" / TOPIC / ".half.block"
    draft.write_bytes(b"")
    past = time.time() - blocking.KEEP_SECONDS - 10
    for file in (path / "staging" / TOPIC / old, draft):
        os.utime(file, (past, past))
    assert blocking.remove_leftovers(DataFolder(path)) == 2
    assert staged_files(path) == [new]
