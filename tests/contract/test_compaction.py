"""Compacted topics: the newest record of each key stays, at its offset."""

import pytest

from services.core.broker.contract import TopicSpec
from services.core.broker.record import Record, TopicPartition
from tests.contract.harness import Harness
from tests.contract.traffic import append, ignore_revoke, until_async


def event(key: bytes, value: bytes | None) -> Record:
    return Record(key, value, 1_700_000_000_000)


async def test_the_newest_of_each_key_stays_at_its_offset(harness: Harness) -> None:
    """If it fails, a table loses a key, readers get records in another order, or a group stops at a removed record."""
    if not harness.compacts:
        pytest.skip("Kinesis does not compact; the next test is about it")
    async with harness.open() as broker:
        name = harness.fresh_name("table")
        await broker.admin.create_topic(TopicSpec(name, partitions=1, retention_ms=1, compact=True))
        assert await broker.admin.compacted([name, harness.fresh_name("missing")]) == {name}
        first = [event(b"a", b"1"), event(b"b", b"1"), event(b"a", b"2"), event(b"c", b"1"), event(b"c", None)]
        for record in first:
            await append(broker, name, [record])
        end = (await broker.reader.describe(name))[0].end

        async def stored() -> dict[int, Record]:
            found: dict[int, Record] = {}
            at = (await broker.reader.describe(name))[0].start
            while (batch := await broker.reader.read(name, 0, at, max_records=100)) is not None:
                found.update(zip(batch.offsets, batch.records, strict=True))
                at = batch.offsets[-1] + 1
            return found

        async def is_compacted() -> bool:
            await append(broker, name, [event(b"z", b"")])
            await harness.compact(name)
            return 0 not in await stored() and 3 not in await stored()

        await until_async(is_compacted, "old values are gone")
        found = {offset: record for offset, record in (await stored()).items() if offset < end}
        assert [(offset, record.key, record.value) for offset, record in found.items() if record.value is not None] == [
            (1, b"b", b"1"),
            (2, b"a", b"2"),
        ]
        source, seen = TopicPartition(name, 0), dict[int, Record]()
        async with broker.consumer(harness.fresh_name("g"), [name], start="earliest", on_revoke=ignore_revoke) as one:
            last = (await broker.reader.describe(name))[0].end - 1
            while last not in seen:
                for batch in await one.poll(max_records=2, max_wait=1):
                    seen.update(zip(batch.offsets, batch.records, strict=True))
                    await one.commit({source: batch.offsets[-1]})
            assert list(seen) == sorted(seen)
            assert (await one.lag())[source].records == 0
        assert seen[1].value == b"1"


async def test_a_backend_says_why_it_does_not_compact(harness: Harness) -> None:
    """If it fails, a table on Kinesis loses each key after a year, and nobody was told."""
    async with harness.open() as broker:
        if harness.compacts:
            assert broker.admin.why_not_compact is None
            return
        assert "Kinesis" in (broker.admin.why_not_compact or "")
        name = await harness.create_topic(broker)
        assert await broker.admin.compacted([name]) == frozenset()
        with pytest.raises(ValueError, match="Kinesis"):
            await broker.admin.create_topic(TopicSpec(harness.fresh_name("table"), compact=True))
