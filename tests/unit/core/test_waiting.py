"""What waits, and for whom: nothing that a destination left behind is overlooked, nothing that was delivered counts."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.errors import DataDamaged, GroupHasMembers, Unavailable
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.control.pauses import Pause, Pauses, write_pause
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import RETRIER_GROUP, RETRY_IN, delay_topic
from services.core.provision import ensure_topics
from services.core.undelivered.waiting import Bookmark, find_waiting, read_bookmark, take_over_positions, write_bookmark
from tests.support.waiting_events import store, waiting_event

HOOK = {"url": "https://example.org/"}
PIPES = PipeFile.model_validate(
    {
        "streams": {"s": {}},
        "pipes": {"late": {"sources": ["s"], "destinations": [{"name": "hook", "webhook": HOOK}]}},
    }
)
CLAIMED = frozenset({"late/hook"})
BACK, PARKED, DELAY = "late.retry", "late.parked", delay_topic(64)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with open_broker(f"log://{tmp_path}/log") as opened:
        await ensure_topics(opened.admin, PIPES)
        yield opened


async def unclaimed(broker: Broker, bookmark: Bookmark | None = None) -> dict[str, dict[str, int]]:
    found = await find_waiting(broker, CLAIMED, bookmark or Bookmark())
    return {lane: dict(places) for lane, places in found.unclaimed.items()}


async def test_an_older_answer_does_not_undo_a_newer_one(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a lane that was resumed parks its events, because an answer about its pause came late."""
    pauses, read, answers = Pauses(broker.reader), broker.reader.read, list[asyncio.Event]()
    lane = "late/hook"
    async with Producer(broker.appender) as producer:
        await write_pause(producer, lane, Pause("paused", "operator", "ann", 1))

        async def read_late(*asked: Any, **more: Any) -> Any:
            found = await read(*asked, **more)
            answers.append(asyncio.Event())
            if len(answers) == 1:
                await answers[0].wait()
            return found

        monkeypatch.setattr(broker.reader, "read", read_late)
        first = asyncio.create_task(pauses.refresh())
        while not answers:
            await asyncio.sleep(0.01)
        await write_pause(producer, lane, Pause("resumed", "operator", "ann", 2))
        second = asyncio.create_task(pauses.refresh())
        await asyncio.wait({second}, timeout=0.2)
        answers[0].set()
        await asyncio.gather(first, second)
    assert pauses.paused() == {}


async def test_everywhere_and_behind_what_is_settled(broker: Broker) -> None:
    """Broken: what waits in one of the places is overlooked, or what was delivered long ago holds up a start."""
    assert await unclaimed(broker) == {}
    for topic in (RETRY_IN, DELAY, BACK, PARKED):
        await store(broker, topic, [waiting_event(lane, n) for lane in ("late/old", "late/hook") for n in range(3)])
    await store(broker, DELAY, [Record(None, b"no retry record", 1)])
    await broker.admin.set_committed(RETRIER_GROUP, DELAY, {0: 0})
    await broker.admin.set_committed("late.old", PARKED, {0: 1})
    found = await find_waiting(broker, CLAIMED, Bookmark())
    assert found.unclaimed == {"late/old": {RETRY_IN: 3, DELAY: 2, BACK: 3, PARKED: 1}}
    await broker.admin.set_committed(RETRIER_GROUP, RETRY_IN, {0: 5})
    await broker.admin.set_committed(RETRIER_GROUP, DELAY, {0: 6})
    for topic in (BACK, PARKED):
        await broker.admin.set_committed("late.old", topic, {0: 5})
    found = await find_waiting(broker, CLAIMED, Bookmark())
    assert found.unclaimed == {}


async def test_of_pipes_that_are_gone(broker: Broker) -> None:
    """Broken: with a whole pipe its waiting events are forgotten, because no file names its topics."""
    await broker.admin.create_topic(TopicSpec("gone.retry", 1))
    await store(broker, "gone.retry", [waiting_event("gone/hook", 1)])
    assert await unclaimed(broker) == {"gone/hook": {"gone.retry": 1}}


async def test_a_bookmark_saves_reading_and_forgets_nobody(broker: Broker) -> None:
    """Broken: each start reads all that was ever parked; or a lane whose events lie before the bookmark is forgotten."""
    await store(broker, PARKED, [waiting_event("late/old", n) for n in range(5)])
    found = await find_waiting(broker, CLAIMED | {"late/old"}, Bookmark())
    assert found.unclaimed == {}
    both = CLAIMED | {"late/old"}
    assert found.bookmark.read == {TopicPartition(BACK, 0): 0, TopicPartition(PARKED, 0): 5}
    assert (found.bookmark.lanes, list(found.bookmark.last)) == (both, [TopicPartition(PARKED, 0)])
    async with Producer(broker.appender) as producer:
        await write_pause(producer, "late/hook", Pause("paused", "operator", "ann", 1))
        await write_bookmark(producer, found.bookmark, 1)
    kept = await read_bookmark(broker.reader)
    assert kept == found.bookmark
    assert await unclaimed(broker, kept) == {"late/old": {PARKED: 5}}
    pauses = Pauses(broker.reader)  # who follows pauses passes a bookmark over
    await pauses.refresh()
    assert list(pauses.paused()) == ["late/hook"]

    await broker.admin.set_committed("late.old", PARKED, {0: 4})
    done = await find_waiting(broker, CLAIMED, kept)
    assert (done.unclaimed, done.bookmark.lanes) == ({}, CLAIMED)
    await store(broker, PARKED, [waiting_event("late/old", 5)])
    assert await unclaimed(broker, done.bookmark) == {"late/old": {PARKED: 1}}


async def test_a_topic_made_anew_is_read_from_its_beginning(broker: Broker) -> None:
    """Broken: after a topic was made anew, nothing in it is seen until it is as long as it was."""
    await store(broker, BACK, [waiting_event("late/hook", n) for n in range(9)])
    kept = (await find_waiting(broker, CLAIMED, Bookmark())).bookmark
    await broker.admin.delete_topic(BACK)
    await broker.admin.create_topic(TopicSpec(BACK, 1))
    await store(broker, BACK, [waiting_event("late/old", 1)])
    assert await unclaimed(broker, kept) == {"late/old": {BACK: 1}}


async def test_a_topic_made_anew_that_is_longer_than_it_was_is_read_from_its_beginning(broker: Broker) -> None:
    """Broken: a topic was made anew and has more records than the bookmark: events of a lane at its beginning wait for ever."""
    await store(broker, BACK, [waiting_event("late/hook", n) for n in range(2)])
    kept = (await find_waiting(broker, CLAIMED, Bookmark())).bookmark
    await broker.admin.delete_topic(BACK)
    await broker.admin.create_topic(TopicSpec(BACK, 1))
    await store(broker, BACK, [waiting_event(lane, 7) for lane in ("late/old", "late/hook", "late/hook")])
    assert await unclaimed(broker, Bookmark.decode(kept.encode())) == {"late/old": {BACK: 1}}


async def test_what_was_read_is_not_read_again(broker: Broker) -> None:
    """Broken: each start reads all that was ever parked."""
    await store(broker, PARKED, [waiting_event("late/hook", n) for n in range(5)])
    kept = (await find_waiting(broker, CLAIMED, Bookmark())).bookmark
    asked: list[int] = []

    class Counting:
        """The reader of a broker, which counts the records that it is asked for."""

        def __getattr__(self, name: str) -> object:
            return getattr(broker.reader, name)

        async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> object:
            asked.append(offset)
            return await broker.reader.read(topic, partition, offset, max_records=max_records)

    await find_waiting(SimpleNamespace(admin=broker.admin, reader=Counting()), CLAIMED, kept)
    assert asked == [4], "only the last one, to see that it is still the same topic"


async def test_a_destination_that_was_served_is_known_without_the_topics(broker: Broker) -> None:
    """Broken: a topic was made anew and is longer than it was, and who has events at its beginning is never seen."""
    await store(broker, BACK, [waiting_event("late/hook", 0)])
    kept = (await find_waiting(broker, CLAIMED | {"late/old"}, Bookmark())).bookmark
    await broker.admin.delete_topic(BACK)
    await broker.admin.create_topic(TopicSpec(BACK, 1))
    await store(broker, BACK, [waiting_event("late/old", 0), waiting_event("late/hook", 1)])
    assert await unclaimed(broker, kept) == {"late/old": {BACK: 1}}


def test_a_bookmark_of_another_version_is_none() -> None:
    """Broken: offsets of a broker whose numbers have 56 digits do not come back, or an odd record stops every start."""
    source = TopicPartition("a.retry", 3)
    long = Bookmark({source: 10**55}, frozenset({"a/b"}), {"a/c": "a/d"}, {source: (10**55 - 7, "0a")})
    assert Bookmark.decode(long.encode()) == long
    for odd in (
        b"",
        b"[]",
        b'{"read": {"a": "x"}, "lanes": []}',
        b'{"read": {}, "lanes": [], "last": {"a:0": ["1"]}}',
        b'{"lanes": []}',
    ):
        with pytest.raises((ValueError, KeyError, AttributeError, TypeError)):
            Bookmark.decode(odd)


@pytest.mark.parametrize("moment", [RETRY_IN, delay_topic(64), delay_topic(16)])
async def test_what_the_retrier_moves_meanwhile_is_seen(broker: Broker, moment: str) -> None:
    """Broken: beside a working retrier, an event goes from a topic that is looked at later into one that was looked at
    already: `check` says that nothing waits, the entry is taken out, and the event is never delivered."""
    before, behind = delay_topic(64), delay_topic(16)
    await store(broker, before, [waiting_event("late/old", 1)])

    class Meanwhile:
        """The admin of a broker, on which the retrier moves the event just before `moment` is looked at."""

        def __getattr__(self, name: str) -> object:
            return getattr(broker.admin, name)

        async def committed(self, group: str, topic: str) -> dict[int, int]:
            if topic == moment:
                await store(broker, behind, [waiting_event("late/old", 1)])
                await broker.admin.set_committed(RETRIER_GROUP, before, {0: 0})
            return await broker.admin.committed(group, topic)

    found = await find_waiting(SimpleNamespace(admin=Meanwhile(), reader=broker.reader), CLAIMED, Bookmark())
    assert found.unclaimed


async def test_who_waits_behind_damage_is_not_forgotten(broker: Broker) -> None:
    """Broken: a parked topic cannot be read for a day, the bookmark forgets a lane whose events lie in it, and once it can be
    read again nobody is told of them."""
    await store(broker, PARKED, [waiting_event("late/old", 1)])
    known = Bookmark({TopicPartition(BACK, 0): 0, TopicPartition(PARKED, 0): 1}, CLAIMED | {"late/old"})

    class Damaged:
        """The reader of a broker, on which nothing can be read."""

        def __getattr__(self, name: str) -> object:
            return getattr(broker.reader, name)

        async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> None:
            raise DataDamaged(topic, ((partition, offset, offset),), "unreadable")

    found = await find_waiting(SimpleNamespace(admin=broker.admin, reader=Damaged()), CLAIMED, known)
    assert list(found.unread) == [TopicPartition(PARKED, 0)]
    assert await unclaimed(broker, found.bookmark) == {"late/old": {PARKED: 1}}


class Cut:
    """Calls of `of`, until the one numbered `at`: it ends the caller before the call, or after it (`late`)."""

    def __init__(self, of: object, calls: "list[str]", at: int, *, late: bool) -> None:
        self._of, self._calls, self._at, self._late = of, calls, at, late

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **more: Any) -> Any:
            self._calls.append(name)
            is_last = len(self._calls) == self._at
            if is_last and not self._late:
                raise Unavailable("ended before")
            result = await getattr(self._of, name)(*args, **more)
            if is_last:
                raise Unavailable("ended after")
            return result

        return call


RENAMED = PipeFile.model_validate(
    {
        "streams": {"s": {}, "u": {}},
        "pipes": {"late": {"sources": ["s", "u"], "destinations": [{"name": "hook", "webhook": HOOK}]}},
    }
)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("at", range(1, 8))
async def test_a_position_is_taken_over_once(broker: Broker, at: int, late: bool) -> None:
    """Broken: after a crash in the middle a new name begins anew in one stream; or it is moved again after it has begun."""
    await ensure_topics(broker.admin, RENAMED)
    async with Producer(broker.appender) as producer:

        async def take_over(calls: list[str], at: int = 0) -> None:
            admin, reader, writer = (Cut(of, calls, at, late=late) for of in (broker.admin, broker.reader, producer))
            await take_over_positions(
                cast("Broker", SimpleNamespace(admin=admin, reader=reader)),
                cast("Producer", writer),
                "late/hook",
                ["late/old"],
                ["s", "u"],
            )

        for topic in ("s", "u"):
            await store(broker, topic, [waiting_event("any/one", n) for n in range(5)])
            await broker.admin.set_committed("late.old", topic, {0: 2})
        calls: list[str] = []
        with suppress(Unavailable):
            await take_over(calls, at)
        assert (len(calls) == at) or "send_to" in calls
        await take_over([])
        for topic in ("s", "u"):
            assert await broker.admin.committed("late.hook", topic) == {0: 2}
            await broker.admin.set_committed("late.hook", topic, {0: 3})
            await broker.admin.set_committed("late.old", topic, {0: 4})
        again: list[str] = []
        await take_over(again)
        assert "copy_positions" not in again
        assert await broker.admin.committed("late.hook", "s") == {0: 3}
        await write_bookmark(producer, Bookmark(), 1)  # it may be lost
        await take_over([])
        assert await broker.admin.committed("late.hook", "s") == {0: 3}


async def test_lanes_that_take_over_at_the_same_time(broker: Broker) -> None:
    """Broken: a pipe has a new name, its lanes start together, and only the last one is on record: the file cannot be changed
    later, because the others' former names seem to have unread events."""
    names = [f"late/{number}" for number in range(5)]
    for number in range(5):
        await broker.admin.set_committed(f"old.{number}", "s", {0: number})
    async with Producer(broker.appender) as producer:
        await write_bookmark(producer, Bookmark(lanes=frozenset({"old/1"}), left={"late/1": ""}), 1)
        takeovers = [take_over_positions(broker, producer, lane, [f"old/{lane[-1]}"], ["s"]) for lane in names]
        await asyncio.gather(*takeovers)
        found = await read_bookmark(broker.reader)
        assert found.left == {f"old/{lane[-1]}": lane for lane in names}
        assert found.lanes == {"old/1"}
        for number in range(5):
            assert await broker.admin.committed(f"late.{number}", "s") == {0: number}
        await producer.send_to("penstock.control", {0: [Record(b"taken over", b"[]", 1)]})
        await write_bookmark(producer, Bookmark(left={"a": "b"}), 1)
        assert (await read_bookmark(broker.reader)).left == {"a": "b"}


async def test_a_lane_takes_over_the_pause_of_its_former_name(broker: Broker) -> None:
    """Broken: without a `penstock apply` before a roll-out, a pause ends when the former name leaves the file."""
    async with Producer(broker.appender) as producer:
        for name in ("late/old", "late/gone", "late/other"):
            await write_pause(producer, name, Pause("paused", "operator", "ann", 1))
        renames = {"late/old": "late/hook", "late/other": "late/third"}
        await take_over_positions(broker, producer, "late/hook", ["late/old", "late/gone"], ["s"], renames)
        pauses = Pauses(broker.reader)
        await pauses.refresh()
        assert pauses.paused().keys() == {"late/old", "late/gone", "late/other", "late/hook"}


async def test_another_member_has_taken_over(broker: Broker) -> None:
    """Broken: of two processes that start together, the second one never joins, because the first one runs already."""
    await store(broker, "s", [waiting_event("any/one", n) for n in range(5)])
    member = broker.consumer("late.hook", ["s"], start="earliest", on_revoke=_ignore)
    async with Producer(broker.appender) as producer, member as consumer:
        await consumer.poll(max_records=1, max_wait=0.1)
        await broker.admin.add_partitions("s", 5)
        await broker.admin.set_committed("late.old", "s", {4: -1})  # a partition that the member has not begun yet
        with pytest.raises(GroupHasMembers):
            await broker.admin.copy_positions("late.old", "late.hook", "s")
        await take_over_positions(broker, producer, "late/hook", ["late/old"], ["s"])


async def test_members_of_an_earlier_file_keep_a_lane_from_its_old_position(broker: Broker) -> None:
    """Broken: during a roll-out a name is used again; the lane continues at a position of long ago, and its unread events are
    never delivered, or delivered ones come again."""
    await store(broker, "s", [waiting_event("any/one", n) for n in range(5)])
    await broker.admin.set_committed("late.hook", "s", {0: 4})
    await broker.admin.set_committed("late.old", "s", {0: 1})
    async with Producer(broker.appender) as producer:
        await write_bookmark(producer, Bookmark(left={"late/hook": "late/other"}), 1)
        async with broker.consumer("late.hook", ["s"], start="earliest", on_revoke=_ignore) as consumer:
            await consumer.poll(max_records=1, max_wait=0.1)
            with pytest.raises(GroupHasMembers, match="perhaps with an earlier pipe file"):
                await take_over_positions(broker, producer, "late/hook", ["late/old"], ["s"])
        await take_over_positions(broker, producer, "late/hook", ["late/old"], ["s"])
        assert (await broker.admin.committed("late.hook", "s"))[0] == 1


async def _ignore(_partitions: object) -> None:
    """Nothing is in flight."""


async def test_what_was_begun_and_never_settled_counts(broker: Broker) -> None:
    """Broken: a destination whose receiver was down from its first event on is removed, and its unread events with it."""
    async with broker.consumer("late.old", ["s"], start="earliest", on_revoke=_ignore) as consumer:
        await consumer.poll(max_records=1, max_wait=0.1)
    await store(broker, "s", [waiting_event("any/one", n) for n in range(5)])
    found = await find_waiting(broker, CLAIMED, Bookmark(lanes=frozenset({"late/old"})))
    assert found.undelivered == {"late/old": {"s": 5}}
