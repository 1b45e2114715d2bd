"""Several brokers as one, beyond what the contract suite tests: failures of one of them, and polls of both at once."""

import asyncio
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.core.broker.contract import Broker, Consumer, Lag, TopicSpec
from services.core.broker.errors import (
    AccessRefused,
    BrokerError,
    HomeChanged,
    NotAllowed,
    NotOwner,
    OffsetOutOfRange,
    Unavailable,
    UnsafeTopic,
)
from services.core.broker.log import LogBroker
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.broker.rights import Right, require_rights
from services.core.broker.several import consumer as several_consumer
from services.core.broker.several.broker import open_several
from services.core.broker.several.brokers import Opening, Places
from services.core.broker.several.consumer import Revocations, SeveralConsumer
from tests.contract.traffic import ignore_revoke

A, B = TopicPartition("a", 0), TopicPartition("b", 0)


class ScriptedConsumer:
    """Gives what the test puts into `ready`, and raises `error` at each poll while it is set."""

    def __init__(self, source: TopicPartition) -> None:
        self.source = source
        self.ready: list[Batch] = []
        self.error: BrokerError | None = None
        self.came = asyncio.Event()
        self.commits: list[Mapping[TopicPartition, int]] = []
        self.paused: set[TopicPartition] = set()
        self.polls = 0

    def give(self, count: int, first: int = 0) -> None:
        records = [Record(None, b"%d" % number, 0) for number in range(first, first + count)]
        self.ready.append(Batch(*self.source, range(first, first + count), records))
        self.came.set()

    async def poll(self, *, max_records: int, max_wait: float) -> list[Batch]:
        self.polls += 1
        if self.error is not None:
            raise self.error
        try:
            async with asyncio.timeout(max_wait):
                await self.came.wait()
        except TimeoutError:
            return []
        found, self.ready = self.ready, []
        self.came.clear()
        return found

    async def commit(self, processed: Mapping[TopicPartition, int]) -> None:
        self.commits.append(processed)
        if self.error is not None:
            raise self.error

    def pause(self, partitions: Collection[TopicPartition]) -> None:
        self.paused |= set(partitions)

    def resume(self, partitions: Collection[TopicPartition]) -> None:
        self.paused -= set(partitions)

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset({self.source})

    async def lag(self) -> dict[TopicPartition, Lag]:
        return {self.source: Lag(1, 0)}


def _both() -> tuple[ScriptedConsumer, ScriptedConsumer, SeveralConsumer, Revocations]:
    first, second = ScriptedConsumer(A), ScriptedConsumer(B)
    revocations = Revocations(ignore_revoke)
    return first, second, SeveralConsumer([(first, ["a"]), (second, ["b"])], revocations), revocations


@asynccontextmanager
async def _open(own: str, openings: Mapping[str, Opening], streams: Mapping[str, str]) -> AsyncIterator[Broker]:
    async with LogBroker.open(own) as default, open_several(default, openings, Places(streams)) as broker:
        yield broker


def _offsets(batches: list[Batch]) -> list[tuple[str, list[int]]]:
    return [(batch.topic, list(batch.offsets)) for batch in batches]


async def test_the_first_with_records_ends_the_wait() -> None:
    """Otherwise a quiet broker would delay each event of the other one by the whole wait."""
    first, second, consumer, _ = _both()
    second.give(2)
    async with asyncio.timeout(600):
        assert _offsets(await consumer.poll(max_records=10, max_wait=6000)) == [("b", [0, 1])]
        first.give(1)
        assert _offsets(await consumer.poll(max_records=10, max_wait=6000)) == [("a", [0])]


async def test_a_broker_that_needs_time_is_read_beside_one_that_never_runs_dry() -> None:
    """Otherwise new events stand still while a lane works off its retries: each poll of theirs would be cancelled too early."""
    first, second, consumer, _ = _both()
    poll = second.poll

    async def ask_first(*, max_records: int, max_wait: float) -> list[Batch]:
        for _ in range(50):  # turns of the event loop: an answer of its broker takes so long
            await asyncio.sleep(0)
        return await poll(max_records=max_records, max_wait=max_wait)

    second.poll = ask_first  # type: ignore[method-assign]
    second.give(1)
    topics: list[str] = []
    for number in range(100):
        first.give(1, first=number)
        topics += [batch.topic for batch in await consumer.poll(max_records=10, max_wait=60)]
    assert topics.count("b") == 1
    assert topics.count("a") >= 99
    await consumer.close()


async def test_a_topic_moves_while_a_member_joins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the member reads the former topic to its end, again, and then nothing, until it leaves for another reason."""
    homes: dict[str, str] = {}
    openings = {"b": partial(LogBroker.open, str(tmp_path / "b"))}
    async with LogBroker.open(str(tmp_path / "own")) as own, open_several(own, openings, Places(homes)) as broker:
        await broker.admin.create_topic(TopicSpec("t", 1))
        join = own.consumer

        @asynccontextmanager
        async def join_slowly(*args: Any, **more: Any) -> AsyncIterator[Consumer]:
            async with join(*args, **more) as consumer:
                homes["t"] = "b"
                yield consumer

        monkeypatch.setattr(own, "consumer", join_slowly)
        async with broker.consumer("g", ["t"], start="earliest", on_revoke=ignore_revoke) as consumer:
            with pytest.raises(HomeChanged, match="broker default"):
                await consumer.poll(max_records=1, max_wait=0)


async def test_a_broker_that_is_only_written_gets_the_records_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a topic of others is sought on the wrong cluster, or theirs gets topics and groups of ours."""
    places = Places({"s": "default"}, {"t": "b"})
    openings = {"b": partial(LogBroker.open, str(tmp_path / "b"))}
    async with LogBroker.open(str(tmp_path / "own")) as own, open_several(own, openings, places) as broker:
        other = await broker.brokers.named("b")
        await other.admin.create_topic(TopicSpec("t", 2))

        async def refuse(*_: object) -> list[str]:
            raise AssertionError("nothing of ours is there")

        monkeypatch.setattr(other.admin, "create_own_topics", refuse)
        monkeypatch.setattr(other.admin, "members", refuse)
        await broker.admin.create_own_topics()
        assert await broker.admin.members("g") == []
        assert await broker.admin.topics() == {}
        assert await broker.admin.present(["t"]) == {"t"}
        await broker.appender.append("t", 1, [Record(None, b"1", 0)], timeout=600)
        assert (await other.reader.describe("t"))[1].end == 1


async def test_a_broker_that_has_nothing_of_a_service_does_not_keep_it_from_starting(tmp_path: Path) -> None:
    """Otherwise the cluster of one destination holds up all lanes, and ingest: events are lost at their senders."""
    error: BrokerError = Unavailable("the cluster of a destination is down")

    def opening() -> AbstractAsyncContextManager[Broker]:
        raise error

    places, right = Places({"s": "default"}, {"existing:b:t": "b"}), Right("Write", "topic", "existing:b:t")
    async with LogBroker.open(str(tmp_path)) as own, open_several(own, {"b": opening}, places) as broker:
        await broker.admin.create_topic(TopicSpec("p.retry", 1))
        await require_rights(broker, [Right("Write", "topic", "s"), Right("Write", "topic", "penstock.groups"), right])
        assert await broker.admin.present(["p.retry", "p.parked"]) == {"p.retry"}
        assert await broker.admin.topics() == {"p.retry": 1}, "no command that only looks would work"
    error = AccessRefused("a customer has changed the password of their cluster")
    async with LogBroker.open(str(tmp_path)) as own, open_several(own, {"b": opening}, places) as broker:
        await require_rights(broker, [Right("Write", "topic", "s"), right])
    error = NotAllowed("Describe on the cluster")
    async with LogBroker.open(str(tmp_path)) as own, open_several(own, {"b": opening}, places) as broker:
        for _ in range(2):  # the second one is not asked
            with pytest.raises(NotAllowed, match="broker b of the pipe file: Describe"):
                await require_rights(broker, [right])
    error = Unavailable("the cluster of a stream is down")
    streams = Places({"s": "b"})
    async with LogBroker.open(str(tmp_path)) as own, open_several(own, {"b": opening}, streams) as broker:
        with pytest.raises(Unavailable, match="of a stream is down"):
            await require_rights(broker, [Right("Write", "topic", "s")])


class _Moving(Places):
    """In the middle of a move: readers on the default broker, writers on b, whose offsets are 100 higher."""

    home = "default"

    def of(self, topic: str) -> str:
        return self.home

    def written_to(self, topic: str) -> str:
        return "b"

    def base(self, name: str, topic: str, partition: int) -> int:
        return 100 if name == "b" else 0


async def test_offsets_have_the_base_of_the_broker_that_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic moves while the former broker answers: its offsets are not those of the new one."""
    places = _Moving({})
    openings = {"b": partial(LogBroker.open, str(tmp_path / "b"))}
    async with LogBroker.open(str(tmp_path / "own")) as own, open_several(own, openings, places) as broker:
        for one in (own, await broker.brokers.named("b")):
            await one.admin.create_topic(TopicSpec("t", 1))
            await one.appender.append("t", 0, [Record(None, b"1", 0)], timeout=600)
        describe, named = own.reader.describe, broker.brokers.named

        async def move(topic: str) -> Any:
            found = await describe(topic)
            places.home = "b"
            return found

        async def move_while_it_opens(name: str) -> Broker:
            places.home = "b"
            return await named(name)

        assert await broker.reader.next_at_least("t") == {0: 101}, "new records go to the other broker"
        monkeypatch.setattr(own.reader, "describe", move)
        assert (await broker.reader.describe("t"))[0].end == 1
        places.home = "default"
        monkeypatch.setattr(broker.brokers, "named", move_while_it_opens)
        batch = await broker.reader.read("t", 0, 0, max_records=1)
        assert batch is not None
        assert list(batch.offsets) == [0]


async def test_both_are_polled_all_the_time() -> None:
    """Otherwise an event waits up to a second for the next call, because the poll of its broker has ended before the other's."""
    first, second, consumer, _ = _both()
    polling = asyncio.create_task(consumer.poll(max_records=10, max_wait=0.4))
    await asyncio.sleep(0.2)
    first.give(1)
    assert _offsets(await polling) == [("a", [0])]
    polling = asyncio.create_task(consumer.poll(max_records=10, max_wait=60))  # the second one's poll is from before
    while second.polls < 2:
        await asyncio.sleep(0.01)
    second.give(1)
    assert _offsets(await polling) == [("b", [0])]
    await consumer.close()


async def test_a_poll_that_never_ends_is_said_and_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the partitions of one broker stand still in silence: the lane goes on with the others, so no watch sees it."""
    monkeypatch.setattr(several_consumer, "_LIMIT_S", 0.05)
    first, second, consumer, _ = _both()
    poll = second.poll

    async def hang(**_: object) -> list[Batch]:
        second.poll = poll  # type: ignore[method-assign]
        await asyncio.Event().wait()
        return []

    second.poll = hang  # type: ignore[method-assign]
    second.give(1)
    first.give(1)
    assert _offsets(await consumer.poll(max_records=10, max_wait=0.01)) == [("a", [0])]
    while consumer._polls:  # the one that hangs
        await asyncio.sleep(0.01)
    with pytest.raises(Unavailable, match="has not ended"):
        await consumer.poll(max_records=10, max_wait=0.01)
    assert _offsets(await consumer.poll(max_records=10, max_wait=60)) == [("b", [0])]
    await consumer.close()


async def test_never_more_than_asked_and_in_order() -> None:
    """A caller has room for so many; the others come first at the next poll."""
    first, second, consumer, _ = _both()
    first.give(3)
    second.give(3)
    found: dict[str, list[int]] = {"a": [], "b": []}
    while sum(map(len, found.values())) < 6:
        batches = await consumer.poll(max_records=2, max_wait=1)
        assert 0 < sum(len(batch.records) for batch in batches) <= 2
        for batch in batches:
            found[batch.topic] += batch.offsets
    assert found == {"a": [0, 1, 2], "b": [0, 1, 2]}


async def test_a_broker_that_fails_does_not_hold_up_the_other() -> None:
    """Its error is raised in turn: the caller waits and polls again, and the other's records come."""
    first, second, consumer, _ = _both()
    first.error = Unavailable("down")
    with pytest.raises(Unavailable):
        await consumer.poll(max_records=10, max_wait=0.01)
    second.give(1)
    assert _offsets(await consumer.poll(max_records=10, max_wait=60)) == [("b", [0])]
    with pytest.raises(Unavailable):
        await consumer.poll(max_records=10, max_wait=60)
    second.give(1, first=1)
    assert _offsets(await consumer.poll(max_records=10, max_wait=60)) == [("b", [1])]


async def test_a_cancelled_poll_loses_nothing() -> None:
    """The inner poll has moved its position when the outer one is cancelled: its records must come with the next poll."""
    first, _, consumer, _ = _both()
    poll = asyncio.create_task(consumer.poll(max_records=10, max_wait=60))
    for _ in range(3):
        await asyncio.sleep(0)
    first.give(2)
    poll.cancel()  # before the loop runs: the inner poll ends in the same turn
    with pytest.raises(asyncio.CancelledError):
        await poll
    assert not first.ready, "the inner poll was cancelled before it took them"
    assert _offsets(await consumer.poll(max_records=10, max_wait=0.01)) == [("a", [0, 1])]


async def test_records_in_hand_are_kept_while_paused_and_dropped_when_revoked() -> None:
    """A paused partition returns nothing; a revoked one belongs to another member, which reads these records again."""
    first, second, consumer, revocations = _both()
    first.give(2)
    second.give(2)
    batches = await consumer.poll(max_records=2, max_wait=1)
    assert sum(len(batch.records) for batch in batches) == 2
    left = B if batches[0].topic == "a" else A
    consumer.pause([left])
    assert await consumer.poll(max_records=10, max_wait=0.01) == []
    consumer.resume([left])
    assert [batch.topic for batch in await consumer.poll(max_records=1, max_wait=1)] == [left.topic]
    await revocations(frozenset({left}))
    assert await consumer.poll(max_records=10, max_wait=0.01) == []


async def test_an_error_counts_for_the_ownership_that_met_it() -> None:
    """The partition comes back as another topic of this name: paused for the error of the old one it would wait for ever."""
    first, second, consumer, revocations = _both()
    first.error = OffsetOutOfRange("a", 0, 1, 5, 9)
    second.give(1)
    assert _offsets(await consumer.poll(max_records=10, max_wait=1)) == [("b", [0])]
    first.error = None
    await revocations(frozenset({A}))
    assert await consumer.poll(max_records=10, max_wait=0.01) == []


async def test_a_commit_reaches_all_that_can_be_reached() -> None:
    """Offsets on a broker that answers are durable, and the caller learns of the other one."""
    first, second, consumer, _ = _both()
    first.error = Unavailable("down")
    with pytest.raises(Unavailable):
        await consumer.commit({A: 1, B: 2})
    assert second.commits == [{B: 2}]
    first.error, second.error = NotOwner(frozenset({A})), NotOwner(frozenset({B}))
    with pytest.raises(NotOwner) as refused:
        await consumer.commit({A: 1, B: 2})
    assert refused.value.partitions == {A, B}
    assert await consumer.lag() == {A: Lag(1, 0), B: Lag(1, 0)}


async def test_a_broker_that_is_down_holds_up_its_topics_only(tmp_path: Path) -> None:
    """It is opened when it is needed, and again when it is back."""
    is_down, tried = True, 0

    @asynccontextmanager
    async def opening() -> AsyncIterator[Broker]:
        nonlocal tried
        tried += 1
        if is_down:
            raise Unavailable("no node answers")
        async with LogBroker.open(str(tmp_path / "other")) as broker:
            yield broker

    several = _open(str(tmp_path / "own"), {"other": opening}, {"there": "other"})
    async with several as broker, Producer(broker.appender) as producer:
        await broker.admin.create_topic(TopicSpec("here.out", 1))
        assert not (await producer.send("here.out", [Record(None, b"1", 0)])).failed
        with pytest.raises(Unavailable, match="broker other of the pipe file: no node answers"):
            await broker.admin.create_topic(TopicSpec("there", 1))
        with pytest.raises(Unavailable):
            await broker.reader.describe("there")
        assert tried == 1, "a broker that is down would be asked by each call"
        is_down = False
        async with asyncio.timeout(600):
            while True:
                try:
                    await broker.admin.create_topic(TopicSpec("there", 1))
                    break
                except Unavailable:
                    await asyncio.sleep(0.05)
        assert not (await producer.send("there", [Record(None, b"1", 0)])).failed
        assert await broker.admin.topics() == {"here.out": 1, "there": 1}
    async with LogBroker.open(str(tmp_path / "own")) as own:
        assert await own.admin.topics() == {"here.out": 1}


async def test_what_lives_elsewhere_is_not_shown(tmp_path: Path) -> None:
    """A stream's topic where it does not live: an older copy, or another fleet's. Nobody may write to it by mistake."""
    own, other = str(tmp_path / "own"), str(tmp_path / "other")
    async with LogBroker.open(own) as first, LogBroker.open(other) as second:
        await first.admin.create_topic(TopicSpec("moved", 2))
        await second.admin.create_topic(TopicSpec("moved", 3))
        await second.admin.create_topic(TopicSpec("foreign", 1))
    several = _open(own, {"other": partial(LogBroker.open, other)}, {"moved": "other"})
    async with several as broker:
        assert await broker.admin.topics() == {"moved": 3}
        assert await broker.appender.partition_count("moved") == 3


async def test_a_stream_is_not_created_beside_its_former_topic(tmp_path: Path) -> None:
    """A person changed `on`: the events that are stored where it lived before would never be delivered, and nobody would know."""
    own, other = str(tmp_path / "own"), str(tmp_path / "other")
    async with LogBroker.open(own) as first:
        await first.admin.create_topic(TopicSpec("orders", 1))
        await first.admin.create_topic(TopicSpec("shop.dead", 1))
    several = _open(own, {"other": partial(LogBroker.open, other)}, {"orders": "other"})
    async with several as broker:
        with pytest.raises(UnsafeTopic, match="default has a topic of this name") as caught:
            await broker.admin.create_topic(TopicSpec("orders", 1))
        assert "if the topic is of others" in str(caught.value), (
            "who is told to delete it deletes the topic of somebody else"
        )
        await broker.admin.create_topic(TopicSpec("invoices", 1))
