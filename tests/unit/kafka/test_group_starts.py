"""Reading which groups have begun: on from the last look, over foreign records, and never past what cannot be read."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec
import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from structlog.testing import capture_logs

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import TopicExists, Unavailable
from services.core.broker.kafka import positions, reader
from services.core.broker.kafka.cluster import Cluster, TopicState
from services.core.broker.kafka.leaders import Fetched
from services.core.broker.kafka.positions import GROUPS, GroupStart, GroupStarts
from services.core.broker.record import Record, TopicPartition

_ORDERS = [TopicPartition("orders", number) for number in range(3)]
_ONE, _OTHER = GroupStart("1", 1), GroupStart("2", 4)


class Stored:
    """The topic: a batch a record. id: empty while there is none."""

    def __init__(self) -> None:
        self.id = ""
        self.batches: list[bytearray] = []

    def add(self, key: bytes, value: bytes) -> bytearray:
        builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 10_000)
        builder.append(0, timestamp=5, key=key, value=value, headers=[])
        data = bytearray(builder.build())
        data[0:8] = len(self.batches).to_bytes(8)
        self.batches.append(data)
        return data

    async def create(self, spec: TopicSpec) -> None:
        if self.id:
            raise TopicExists(spec.name)
        self.id = f"the {spec.name}"

    async def append(self, _topic: str, records: Sequence[Record]) -> None:
        for record in records:
            self.add(record.key or b"", record.value or b"")

    async def describe_agreed(self, _topics: Iterable[str]) -> dict[str, TopicState]:
        return {GROUPS: TopicState({}, internal=False, id=self.id)} if self.id else {}

    describe = describe_agreed

    async def read(self, _cluster: Any, _source: Any, _leader: int, offset: int, **_: Any) -> Fetched:
        return Fetched(bytes(b"".join(self.batches[offset:])))


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> Stored:
    found = Stored()

    async def ends(_cluster: Any, sources: Iterable[TopicPartition], *_: Any) -> dict[TopicPartition, int]:
        return dict.fromkeys(sources, len(found.batches))

    async def starts(_cluster: Any, sources: Iterable[TopicPartition], *_: Any) -> dict[TopicPartition, int]:
        return dict.fromkeys(sources, 0)

    async def partitions(_cluster: Any, topics: Iterable[str]) -> set[TopicPartition]:
        return {TopicPartition(topic, 0) for topic in topics}

    for where in (positions, reader):
        for name, fake in (("ends", ends), ("list_offsets", starts), ("leaders_of", starts), ("fetch", found.read)):
            monkeypatch.setattr(where, name, fake, raising=False)
    monkeypatch.setattr(reader, "partitions_of", partitions)
    return found


def _groups(stored: Stored) -> GroupStarts:
    return GroupStarts(cast(Cluster, stored), stored.create, stored.append)


async def test_what_was_put_on_record_is_read_by_others_and_read_on(stored: Stored) -> None:
    """If it fails, a group whose offsets Kafka forgot begins anew, and skips what waits for it."""
    ours, others = _groups(stored), _groups(stored)
    assert await others.find("g", _ORDERS) == {}
    await ours.record("g", {_ORDERS[0]: _ONE})
    assert await others.find("g", _ORDERS) == {_ORDERS[0]: _ONE}
    await ours.record("g", {_ORDERS[0]: _ONE, _ORDERS[1]: _OTHER})
    assert len(stored.batches) == 2, "what is on record is not written again"
    assert await others.find("g", _ORDERS) == {_ORDERS[0]: _ONE, _ORDERS[1]: _OTHER}
    assert await others.find("h", _ORDERS) == {}


async def test_a_record_made_anew_is_read_from_its_beginning(stored: Stored) -> None:
    """If it fails, what was deleted counts for ever, and what is written then is never read."""
    groups = _groups(stored)
    await groups.record("g", dict.fromkeys(_ORDERS, _ONE))
    assert len(await groups.find("g", _ORDERS)) == len(_ORDERS)
    stored.id, stored.batches = "another", []
    await _groups(stored).record("g", {_ORDERS[2]: _OTHER})
    assert await groups.find("g", _ORDERS) == {_ORDERS[2]: _OTHER}


async def test_what_is_not_ours_is_passed_over(stored: Stored) -> None:
    """If it fails, one record that somebody wrote there by mistake keeps every destination from starting."""
    groups = _groups(stored)
    await groups.record("g", {_ORDERS[0]: _ONE})
    stored.add(b"\xff", msgspec.json.encode(_ONE))
    stored.add(b"key", b"no JSON")
    await groups.record("g", {_ORDERS[1]: _OTHER})
    with capture_logs() as logs:
        assert await groups.find("g", _ORDERS) == {_ORDERS[0]: _ONE, _ORDERS[1]: _OTHER}
    assert [(line["event"], line["offset"]) for line in logs] == [
        ("groups_record_unreadable", 1),
        ("groups_record_unreadable", 2),
    ]


async def test_what_cannot_be_read_is_not_passed_over(stored: Stored) -> None:
    """If it fails, a flipped bit makes groups unknown that have begun: they begin anew in silence."""
    groups = _groups(stored)
    await groups.record("g", {_ORDERS[0]: _ONE})
    await groups.record("g", {_ORDERS[1]: _ONE})
    await groups.record("g", {_ORDERS[2]: _ONE})
    stored.batches[1][-3] ^= 1
    for _ in range(2):
        with pytest.raises(Unavailable, match=r"penstock\.groups.*1 .*Try: "):
            await _groups(stored).find("g", _ORDERS)


async def test_a_renamed_group_has_begun_where_the_old_one_has(stored: Stored) -> None:
    """If it fails, a group that is renamed after Kafka forgot its offsets begins anew, and skips what waits for it."""
    groups = _groups(stored)
    await groups.record("old", {_ORDERS[0]: _ONE, _ORDERS[1]: _ONE})
    await groups.record("new", {_ORDERS[1]: _OTHER})
    assert await _groups(stored).copy("old", "new", _ORDERS)
    assert await groups.find("new", _ORDERS) == {_ORDERS[0]: _ONE, _ORDERS[1]: _OTHER}
    assert not await groups.copy("old", "new", _ORDERS)
