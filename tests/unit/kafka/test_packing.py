"""Record batches as Kafka stores them."""

from aiokafka.record.memory_records import MemoryRecords

from services.core.broker.kafka.record_batch import BATCH_FRAMING, MAX_RECORD_BYTES, Identity, pack
from services.core.broker.record import Record, content_bytes
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
    read = [Record(r.key, r.value, r.timestamp, tuple(r.headers)) for r in batch]
    assert read == records


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
