"""The portable partitioner against an independent implementation of Kafka's rule."""

from aiokafka.partitioner import DefaultPartitioner
from hypothesis import given
from hypothesis import strategies as st

from services.core.broker.partitioner import choose_partition, split_by_key
from services.core.broker.record import Record


@given(st.binary(max_size=300), st.integers(1, 500))
def test_same_partition_as_kafka(key: bytes, partitions: int) -> None:
    """If it fails, events of one key land in different partitions by which client sent them: their order is gone."""
    everything = list(range(partitions))
    assert choose_partition(key, partitions) == DefaultPartitioner()(key, everything, everything)


def test_known_vectors() -> None:
    """If it fails, both implementations drifted from the murmur2 values that Kafka's own tests fix."""
    hashes = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    for key, signed in hashes.items():
        assert choose_partition(key, 1 << 31) == signed & 0x7FFFFFFF


@given(st.lists(st.tuples(st.none() | st.binary(max_size=8), st.binary(max_size=8))), st.integers(1, 9))
def test_split_keeps_everything_in_order(rows: list[tuple[bytes | None, bytes]], partitions: int) -> None:
    """If it fails, splitting a request by key drops, doubles or reorders its events."""
    records = [Record(key, value, 0) for key, value in rows]
    parts = split_by_key(records, partitions, keyless=partitions - 1)
    for partition, part in parts.items():
        belongs = [
            r
            for r in records
            if (partitions - 1 if r.key is None else choose_partition(r.key, partitions)) == partition
        ]
        assert part == belongs
    assert sum(map(len, parts.values())) == len(records)
