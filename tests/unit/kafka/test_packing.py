"""Record batches as Kafka stores them."""

import pytest
from aiokafka.record.memory_records import MemoryRecords

from services.core.broker.kafka.record_batch import (
    BATCH_FRAMING,
    MAX_RECORD_BYTES,
    Identity,
    Row,
    make_batch,
    pack,
)
from services.core.broker.record import Headers, Record, TopicPartition, content_bytes
from services.core.event import TIME, restore_time
from tests.contract.traffic import numbered

_WHO = Identity(77, 3)


def test_a_batch_carries_who_sent_it_and_everything_in_it() -> None:
    """If it fails, the broker cannot recognise a repeated batch, or records are altered."""
    records = [Record(b"k", b"v", 5, (("h", b"1"),)), Record(None, b"", 6, ()), Record(b"k", None, 4, ())]
    packed = pack(records, 1 << 20, _WHO, 9)
    assert packed.count == 3
    batch = MemoryRecords(bytes(packed.data)).next_batch()
    assert batch is not None
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (77, 3, 9)
    assert batch.validate_crc()
    stored = list(batch)
    assert [row.timestamp for row in stored] == [5, 6, 4]
    assert [row.headers[-1] for row in stored] == [(TIME, b"5"), (TIME, b"6"), (TIME, b"4")]
    assert [row.headers[:-1] for row in stored] == [list(record.headers) for record in records]


_STORING = 1_800_000_000_000


def _rows(data: bytes) -> list[Row]:
    """As Kafka gives them back from a topic that keeps the time of storing."""
    batch = MemoryRecords(data).next_batch()
    assert batch is not None
    return [Row(row.offset, row.key, row.value, _STORING, tuple(row.headers)) for row in batch]


def test_what_is_read_is_what_was_written() -> None:
    """If it fails, a topic that keeps the time of storing loses event times, or our header is delivered to a receiver."""
    written = [
        Record(b"k", b"v", 1_700_000_000_123, (("h", b"1"),)),
        Record(None, b"", 0, ()),
        Record(b"k", None, 1_700_000_000_123, ((TIME, b"7"),)),
    ]
    rows = _rows(bytes(pack(written, 1 << 20, _WHO, 0).data))
    assert make_batch(TopicPartition("t", 0), rows).records == written


@pytest.mark.parametrize(
    "headers",
    [(), (("h", b"1"),), ((TIME, b"1"), ("h", b"1")), ((TIME, b"soon"),), ((TIME, b"9" * 16),), ((TIME, b""),)],
)
def test_without_a_valid_time_the_time_of_storing_counts(headers: Headers) -> None:
    """If it fails, a record of others cannot be read, or has another time than `restore_time` says."""
    rows = [Row(0, b"k", b"v", 5, headers), Row(1, b"k", b"v", 5, (*headers, ("null", None)))]
    read = make_batch(TopicPartition("t", 0), rows).records
    assert read[0] == Record(b"k", b"v", *restore_time(5, headers)) == Record(b"k", b"v", 5, headers)
    assert read[1] == Record(b"k", b"v", 5, (*headers, ("null", b"")))
    assert restore_time(5, headers) == (5, headers)
    plain = Record(b"k", b"v", 5, headers)
    assert _rows(bytes(pack([plain], 1 << 20, _WHO, 0, timed=False).data))[0].headers == headers, "a topic of others"
    theirs = make_batch(TopicPartition("t", 0), [Row(0, b"k", b"v", 5, (*headers, (TIME, b"1")))], timed=False).records
    assert theirs == [Record(b"k", b"v", 5, (*headers, (TIME, b"1")))], "in a topic of others, anybody's header"
    no_time = Record(b"k", b"v", -1, headers)
    assert _rows(bytes(pack([no_time], 1 << 20, _WHO, 0).data))[0].headers == headers, (
        "a record of others without a time"
    )


def test_packing_stops_at_the_limit() -> None:
    """If it fails, the broker refuses whole batches as too large."""
    records = numbered(range(100))
    packed = pack(records, 500, _WHO, 0)
    assert 0 < packed.count < 100
    assert len(packed.data) <= 500
    assert pack([Record(b"k", b"x" * 900, 0), *records], 500, _WHO, 0).count == 1


def test_the_largest_record_fits_our_topics() -> None:
    """If it fails, a record that we promise to take is refused by the topics that we create."""
    headers = tuple((f"ce_{number}", b"x" * 50) for number in range(30))
    largest = Record(b"k" * 100, b"", 1 << 60, headers)
    record = Record(largest.key, b"v" * (MAX_RECORD_BYTES - content_bytes(largest)), largest.timestamp, headers)
    assert content_bytes(record) == MAX_RECORD_BYTES
    assert len(pack([record], 1, _WHO, 0).data) <= MAX_RECORD_BYTES + BATCH_FRAMING
