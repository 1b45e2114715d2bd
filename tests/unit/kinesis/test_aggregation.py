"""The KPL's format, both ways, against somebody else's implementation of it."""

import base64
from contextlib import suppress
from hashlib import md5

import pytest
from aws_kinesis_agg.aggregator import RecordAggregator
from aws_kinesis_agg.deaggregator import deaggregate_records
from hypothesis import given
from hypothesis import strategies as st

from services.core.broker.kinesis.record_format import AGGREGATE_MAGIC, BadAggregate, Packer, packed_size, unpack

LARGE = st.integers(16_000, 17_000).map(lambda size: b"x" * size)
"""About where the length of a length changes. Random bytes would take hypothesis too long on a busy machine."""
PAYLOADS = st.lists(st.one_of(st.binary(max_size=300), LARGE), max_size=20)
KEY, HASH_KEY = "7", 1 << 127


@given(PAYLOADS)
def test_another_reader_reads_what_we_write(payloads: list[bytes]) -> None:
    """If it fails, a KCL consumer or a Lambda sees garbage, or other events than were sent."""
    data = Packer(KEY, HASH_KEY).pack(payloads)
    outer = {"partitionKey": "outer", "explicitHashKey": "0", "sequenceNumber": "1"}
    event = {"kinesisSchemaVersion": "1.0", "approximateArrivalTimestamp": 1.0, **outer}
    row = {"kinesis": {"data": base64.b64encode(data).decode(), **event}}
    read = deaggregate_records(row) if payloads else []
    assert [base64.b64decode(one["kinesis"]["data"]) for one in read] == payloads
    assert {one["kinesis"]["partitionKey"] for one in read} <= {KEY}
    assert {one["kinesis"]["explicitHashKey"] for one in read} <= {str(HASH_KEY)}


@given(st.lists(st.tuples(st.text(min_size=1, max_size=20), st.binary(max_size=300)), min_size=1, max_size=20))
def test_we_read_what_another_writer_writes(sent: list[tuple[str, bytes]]) -> None:
    """If it fails, what a KPL producer put into a stream is lost on us."""
    aggregator = RecordAggregator()
    for key, data in sent:
        assert aggregator.add_user_record(key, data) is None
    _, _, data = aggregator.clear_and_get().get_contents()
    read = unpack(data)
    assert read is not None
    assert [(one.partition_key, one.data) for one in read] == sent


@given(PAYLOADS)
def test_sizes_are_exact(payloads: list[bytes]) -> None:
    """If it fails, an entry grows above the service's limit, and its append is refused for ever."""
    packer = Packer(KEY, HASH_KEY)
    assert len(packer.pack(payloads)) == packer.overhead() + sum(packed_size(len(one)) for one in payloads)


@given(st.data())
def test_a_changed_byte_is_no_aggregate(data: st.DataObject) -> None:
    """If it fails, altered data pass for events."""
    packed = bytearray(Packer(KEY, HASH_KEY).pack([b"one", b"two"]))
    packed[data.draw(st.integers(0, len(packed) - 1))] ^= data.draw(st.integers(1, 255))
    assert unpack(bytes(packed)) is None


@given(st.binary(max_size=60))
def test_any_message_is_read_or_refused(message: bytes) -> None:
    """If it fails, one odd record of another writer ends a consumer, or makes it loop."""
    with suppress(BadAggregate):
        unpack(AGGREGATE_MAGIC + message + md5(message).digest())


@pytest.mark.parametrize(
    "message", [b"\x1a\x05\x08\x00\x1a\x05ab", b"\x1a\x02\x08\x00", b"\x1a\x04\x08\x09\x1a\x00", b"\x0d1234"]
)
def test_what_is_cut_short_or_points_nowhere_is_refused(message: bytes) -> None:
    """If it fails, half an aggregate is delivered as if it were whole."""
    with pytest.raises(BadAggregate):
        unpack(AGGREGATE_MAGIC + message + md5(message).digest())
