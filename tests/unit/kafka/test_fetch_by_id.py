"""Fetch requests by topic ids, in aiokafka's fetcher."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from aiokafka.protocol.fetch import FetchRequest, FetchResponse_v11
from aiokafka.structs import TopicPartition as KafkaPartition

from services.core.broker.kafka import aiokafka_internals
from services.core.broker.kafka.aiokafka_internals import _ObservedClient
from services.core.broker.kafka.fetch_by_id import FetchById, FetchByIdResponse, FetchByIdStruct, is_refused

_OLD, _NEW = UUID(int=1), UUID(int=2)
_HERE, _UNPLACED = KafkaPartition("t", 0), KafkaPartition("t", 1)
_UNKNOWN_TOPIC, _NOT_LEADER = 3, 6


class Asked:
    """A request for both partitions, of which one has a position. read: the id of the topic in which it is read."""

    def __init__(self) -> None:
        self.read: UUID | None = _NEW
        named = FetchRequest(500, 1, 1 << 20, 1, [("t", [(0, 7, 100), (1, 9, 100)])])
        self.request = FetchById(named, lambda source: self.read if source == _HERE else None)
        self.during: Callable[[], None] = lambda: None
        self.observed: list[Any] = []
        self.answer: Any = None

    async def send(self, _node: int, request: FetchById) -> Any:
        self.sent = FetchByIdStruct.decode(request.prepare({1: (4, 17)}).encode())
        self.during()
        return FetchByIdResponse.decode(self.answer.encode())

    async def fetch(self, code: int, data: bytes, *, of: UUID = _NEW) -> list[Any]:
        """What aiokafka gets of the partition."""
        row: tuple[Any, ...] = (0, code, 20, 18, 2, [(5000, 8, {})], -1, data, {})
        self.answer = FetchByIdResponse(0, 0, 0, [(of, [row], {})], {})
        client = _ObservedClient(SimpleNamespace(send=self.send), self.observed.append)
        [(topic, [found])] = (await client.send(1, self.request)).topics
        assert topic == "t"
        return list(found)


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aiokafka_internals, "_PAUSE", 0)


async def test_a_partition_is_asked_for_by_the_id_of_its_topic_once_it_has_a_position() -> None:
    """If it fails, a node that hears no news answers with the records of a topic that was deleted."""
    asked = Asked()
    assert await asked.fetch(0, b"records") == [0, 0, 20, 18, 2, [(5000, 8)], -1, b"records"]
    assert asked.request.topics == [("t", [(0, 7, 100)])], "aiokafka looks up by these where the answer goes"
    assert asked.sent.topics == [(_NEW, [(0, -1, 7, -1, -1, 100, {})], {})]
    assert len(asked.observed) == 1


@pytest.mark.parametrize("code", [100, 103])
async def test_a_node_that_knows_another_topic_is_asked_again(code: int) -> None:
    """If it fails, a member waits for ever for a node that has not heard yet, or reads nothing after it has."""
    assert (await Asked().fetch(code, b""))[1] == _UNKNOWN_TOPIC


@pytest.mark.parametrize("code", [5, 9, 56, 74, 75, 78])
async def test_a_node_that_may_not_lead_any_more(code: int) -> None:
    """If it fails, a member asks the former leader, or one whose disk is broken, until its metadata is old."""
    assert (await Asked().fetch(code, b""))[1] == _NOT_LEADER


@pytest.mark.parametrize(
    ("rows", "expected"),
    [([(0, b"")], False), ([(6, b"")], True), ([(0, b""), (-1, b"")], True), ([(6, b""), (0, b"records")], False)],
)
def test_only_an_answer_that_brings_nothing_else_is_a_refusal(rows: list[tuple[int, bytes]], expected: bool) -> None:
    """If it fails, a node that refuses is asked thousands of times a second, or what else it has comes late."""
    found: list[tuple[Any, ...]] = [(number, code, 20, 18, 2, [], -1, data) for number, (code, data) in enumerate(rows)]
    assert is_refused(FetchResponse_v11(0, 0, 0, [("t", found)])) is expected


async def test_an_answer_that_comes_after_the_topic_was_made_anew_is_thrown_away() -> None:
    """If it fails, the first records of the new topic are taken for read: the old one's came in their place."""
    asked = Asked()
    asked.read = _OLD
    asked.request = FetchById(asked.request._named, lambda source: asked.read if source == _HERE else None)
    asked.during = lambda: setattr(asked, "read", _NEW)
    code, data = (await asked.fetch(0, b"old", of=_OLD))[1::6]
    assert (code, data) == (_UNKNOWN_TOPIC, b"")


async def test_an_error_of_the_whole_answer_is_one_of_each_partition() -> None:
    """If it fails, aiokafka takes a refusal for an empty answer, and asks again at once, for ever."""
    asked = Asked()
    asked.answer = FetchByIdResponse(0, 100, 0, [], {})
    named = asked.request.read(asked.answer)
    assert [row[:2] for _, rows in named.topics for row in rows] == [(0, _UNKNOWN_TOPIC)]
