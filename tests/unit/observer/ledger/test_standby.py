"""Two observers of one fleet on a real log: one speaks, and the other takes over."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import Mock

import pytest

from services.core.broker.contract import Broker, OnRevoke, TopicSpec
from services.core.broker.producer import Producer
from services.core.broker.record import TopicPartition
from services.core.pipe_file.topic_names import CONTROL
from services.observer import follower, standby
from services.observer.alarms import Alarm
from services.observer.follower import StandsBy
from services.observer.planned import Window
from services.observer.standby import SpeakerLock
from tests.unit.observer.ledger.following import DEADLINE_S, FINAL_MS, Observer, alive, losing, report
from tests.unit.observer.ledger.stories import START_MS

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(autouse=True)
async def control(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standby, "POLL_WAIT_S", 0.02)
    await broker.admin.create_topic(TopicSpec(CONTROL, 1))


class Member(Observer):
    """An observer that shares its fleet with others. `kill` ends it as SIGKILL does."""

    def __init__(self, broker: Broker, producer: Producer) -> None:
        super().__init__(broker, producer, FINAL_MS)
        self.lock = SpeakerLock(broker, self.follower.step_down)
        self.follower.share(self.lock)

    @asynccontextmanager
    async def taking_part(self) -> AsyncIterator["Member"]:
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.lock.run(stopping))
            group.create_task(self.follower.run(stopping))
            try:
                yield self
            finally:
                stopping.set()

    async def speaks(self) -> None:
        await self.until(lambda: self.follower.speaks and not self.follower.catching_up)


async def settled(one: Member, two: Member) -> tuple[Member, Member]:
    """The speaker and the other one. A new member may get the lock."""
    members = [one, two]
    await one.until(
        lambda: (
            sorted(member.follower.speaks for member in members) == [False, True]
            and not any(member.follower.catching_up for member in members)
            and all(member.lock.is_held == member.follower.speaks for member in members)
        )
    )
    return (one, two) if one.follower.speaks else (two, one)


async def test_the_lock_is_not_taken_back_while_it_is_given_up(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: two observers speak while one gives way to the other: each alarm of that time is sent twice."""
    stepping_down, may_end, revoking = asyncio.Event(), asyncio.Event(), list[OnRevoke]()

    async def step_down() -> None:
        stepping_down.set()
        await may_end.wait()

    @asynccontextmanager
    async def join(*_: object, on_revoke: OnRevoke, **__: object) -> AsyncIterator[Mock]:
        revoking.append(on_revoke)
        member = Mock(looks=0, assignment=lambda: frozenset({TopicPartition(CONTROL, 0)}))

        async def poll(**_: object) -> None:
            member.looks += 1
            await asyncio.sleep(0)

        member.poll = poll
        joined.append(member)
        yield member

    joined = list[Mock]()
    monkeypatch.setattr(broker, "consumer", join)
    lock, stopping = SpeakerLock(broker, step_down), asyncio.Event()
    running = asyncio.create_task(lock.run(stopping))
    async with asyncio.timeout(DEADLINE_S):
        while not lock.is_held:
            await asyncio.sleep(0)
        leaving = asyncio.ensure_future(revoking[0](frozenset({TopicPartition(CONTROL, 0)})))
        await stepping_down.wait()
        looks = joined[0].looks
        while joined[0].looks < looks + 5:
            await asyncio.sleep(0)
        taken_back = bool(lock.is_held)
        may_end.set()
        await leaving
        stopping.set()
        await running
    assert not taken_back


async def test_one_speaks_and_the_other_knows_the_same(broker: Broker) -> None:
    """Broken: two observers send each alarm twice, store over each other, or the second one silences alarms of the first."""
    async with Producer(broker.appender) as producer:
        one, two = Member(broker, producer), Member(broker, producer)
        async with one.taking_part(), two.taking_part(), asyncio.timeout(DEADLINE_S):
            speaker, other = await settled(one, two)
            await report(broker, *losing(2), *alive(FINAL_MS))
            await speaker.until(lambda: len(speaker.final) == 1)
            await other.until(lambda: other.row().why_open is None and other.row().missing == 2)
            assert other.final == [], "it raises no alarm"
            with pytest.raises(StandsBy):
                await other.follower.announce(Window("deploy", None, START_MS, FINAL_MS, "ci"))


async def test_a_speaker_that_was_frozen_accepts_no_planned_action(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: an operator's announcement is accepted by an observer that was replaced, and its successor raises the alarms."""
    async with Producer(broker.appender) as producer:
        frozen, successor = Member(broker, producer), Member(broker, producer)
        for one in (frozen, successor):  # the lock went from one to the other, and the first does not know it yet
            one.lock.is_held = True
            await one.follower._start()
            await one.follower.keep()
        window = Window("deploy", None, START_MS, FINAL_MS, "ci")
        with pytest.raises(StandsBy):
            await frozen.follower.announce(window)
        await successor.follower.announce(window)
        with pytest.raises(StandsBy):
            await frozen.follower.cancel(window.id, "ci", "")
        assert frozen.follower.speaks, "until the lock says otherwise"
        monkeypatch.setattr(follower, "REPLACED_S", 0.0)
        with pytest.raises(StandsBy):
            await frozen.follower.keep()
        assert frozen.follower._must_start_again(), "it holds the lock, so it is no longer the frozen one"


async def test_the_other_takes_over_with_what_was_not_sent(broker: Broker) -> None:
    """Broken: the speaker ends with an alarm that its receiver has not accepted, and nobody ever sends it; or its successor
    raises all alarms of the last day again."""
    async with Producer(broker.appender) as producer:
        one, two = Member(broker, producer), Member(broker, producer)
        async with asyncio.timeout(DEADLINE_S), two_tasks(one) as first, two_tasks(two) as second:
            speaker, other = await settled(one, two)
            await report(broker, *losing(2), *alive(FINAL_MS))
            await speaker.until(lambda: len(speaker.final) == 1)
            speaker.follower.untold.add(Alarm("loss-x", {"type": "penstock.loss"}))
            await speaker.follower.announce(Window("deploy", None, START_MS, FINAL_MS, "ci"))
            assert other.follower.untold.all() == ()
            stopping, ended = first if speaker is one else second
            stopping.set()
            await ended
            await other.speaks()
            assert [alarm.id for alarm in other.follower.untold.all()] == ["loss-x"]
            assert [window.by for window in other.follower.planned.all()] == ["ci"]
            assert other.row().missing == 2
            assert other.final == [], "no alarm comes again"
            assert speaker.follower.untold.all() == (), "what another one sends"


@asynccontextmanager
async def two_tasks(member: Member) -> AsyncIterator[tuple[asyncio.Event, "asyncio.Future[tuple[None, None]]"]]:
    stopping = asyncio.Event()
    ended = asyncio.gather(member.lock.run(stopping), member.follower.run(stopping))
    try:
        yield stopping, ended
    finally:
        stopping.set()
        await ended
