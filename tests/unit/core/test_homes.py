"""Where a stream lives: the order of the records decides, and no acknowledged event is behind a hand-over."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from services.core.broker.contract import Appended, Broker, TopicSpec
from services.core.broker.errors import OutcomeUnknown, Unavailable, UnsafeTopic
from services.core.broker.log import LogBroker
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.broker.several import brokers
from services.core.broker.several.broker import SeveralBrokers, open_several
from services.core.broker.several.brokers import DEFAULT
from services.core.clock import boot_seconds
from services.core.control import homes
from services.core.control.homes import Home, Homes, MigrationStep, State
from services.core.fleet_broker import open_fleet_broker
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import CONTROL

STEPS: tuple[State, ...] = ("copying", "held", "written", "moved", "finished")


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(homes, "LEASE_S", 1.0)
    monkeypatch.setattr(homes, "HOLD_S", 1.5)
    monkeypatch.setattr(homes, "FOLLOW_S", 0.05)
    monkeypatch.setattr(homes, "_APPEND_S", 600.0)


def _apply(home: Home, states: Sequence[State], to: str = "b") -> Home:
    for state in states:
        after = home.after(home.epoch + 1, MigrationStep(state, to, home.epoch, "test", 0, home="a", bases={0: 5}))
        assert after is not None, f"{state} is void after {home}"
        home = after
    return home


def test_each_step_continues_the_one_before() -> None:
    """Otherwise a migration that was frozen would go on from a state that is no longer there."""
    start = Home("a", "a")
    assert _apply(start, STEPS[:1]).state == "copying"
    assert _apply(start, STEPS[:3]).writers == "b"
    assert _apply(start, STEPS[:3]).readers == "a"
    moved = _apply(start, STEPS[:4])
    assert (moved.readers, moved.writers, moved.state, moved.former) == ("b", "b", None, "a")
    assert _apply(start, STEPS).former == ""
    held = _apply(start, STEPS[:2])
    assert held.after(9, MigrationStep("written", "b", held.epoch - 1, "frozen", 0)) is None
    released = _apply(held, ["released"])
    assert released.state == "copying"
    assert released.after(9, MigrationStep("written", "b", held.epoch, "too late", 0)) is None
    assert released.after(9, MigrationStep("written", "b", released.epoch, "not held", 0)) is None
    assert moved.after(9, MigrationStep("copying", "c", moved.epoch, "x", 0, home="b")) is None, (
        "the former topic is still there"
    )
    assert moved.after(9, MigrationStep("copying", "a", moved.epoch, "x", 0, home="b")) is not None


def test_the_pairs_of_a_copy_are_in_the_record_of_the_hand_over() -> None:
    """Whoever completes the move after a crash begins at them. Offsets of Kinesis have 206 bits."""
    held = _apply(Home("a", "a"), STEPS[:2])
    move = MigrationStep(
        "written", "b", held.epoch, "x", 0, copy_ends={0: 9}, pairs={0: [(1 << 205, 5), (1 << 206, 7)]}
    )
    written = held.after(9, msgspec.json.decode(msgspec.json.encode(move), type=MigrationStep))
    assert written is not None
    assert written.pairs == {0: [(1 << 205, 5), (1 << 206, 7)]}
    moved = _apply(written, ["moved", "finished", "copying"], to="a")
    assert moved.pairs == {}


def test_the_records_of_the_version_before_are_read_and_written() -> None:
    """Broken: at a rolling upgrade in the middle of a move one half of the fleet reads other homes than the other half."""
    value = (
        b'{"state":"written","to":"b","of":4,"by":"x","at":9,"home":"","bases":{"0":9},"ends":{"0":7},"copy":"","starts":{},'
        b'"hold":0.0,"there":{"0":5},"marks":{"0":[[7,5]]},"version":1}'
    )
    step = msgspec.json.decode(value, type=MigrationStep)
    assert (step.ends, step.copy_ends, step.pairs) == ({0: 7}, {0: 5}, {0: [(7, 5)]})
    assert msgspec.json.encode(step) == value


def test_the_first_record_counts_more_than_the_pipe_file() -> None:
    """A person writes `on: b` after the move: the offsets there would begin again."""
    assert _apply(Home("b", "b"), STEPS[:4]).bases == _apply(Home("a", "a"), STEPS[:4]).bases == {"b": {0: 5}}
    assert _apply(Home("b", "b"), STEPS[:4]).former == "a"


class SlowAppender:
    """Of a broker: its appends wait, as those of a process that is frozen or of a slow network, and are stored afterwards."""

    def __init__(self, broker: Broker) -> None:
        self._appender, self.reaches, self.go = broker.appender, asyncio.Event(), asyncio.Event()

    async def partition_count(self, topic: str) -> int:
        return await self._appender.partition_count(topic)

    async def append(self, topic: str, partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        self.reaches.set()
        await self.go.wait()
        return await self._appender.append(topic, partition, records, timeout=timeout)


@asynccontextmanager
async def _fleet(folder: Path) -> AsyncIterator[tuple[SeveralBrokers, Homes, Broker, Broker]]:
    """With a stream s on the fleet's own log, which is empty."""
    async with LogBroker.open(str(folder / "own")) as own, LogBroker.open(str(folder / "b")) as other:
        existing = await own.admin.topics()
        for name, broker in (("s", own), ("s", other), (CONTROL, own)):
            if name not in existing:
                await broker.admin.create_topic(TopicSpec(name, 1))
        places = Homes({"s": DEFAULT}, own)
        await places.refresh()
        following = asyncio.create_task(places.follow())

        @asynccontextmanager
        async def opening() -> AsyncIterator[Broker]:
            yield other

        try:
            async with open_several(own, {"b": opening}, places) as fleet:
                yield fleet, places, own, other
        finally:
            following.cancel()


async def _ends(*brokers: Broker) -> list[int]:
    return [(await broker.reader.describe("s"))[0].end for broker in brokers]


async def test_an_append_that_ends_after_the_hand_over_is_not_acknowledged(tmp_path: Path) -> None:
    """It is behind the end of the copy. It is repeated where the stream is, and its first copy is not in the stream."""
    async with _fleet(tmp_path) as (fleet, places, own, other):
        slow = SlowAppender(own)
        own.appender = slow  # type: ignore[misc]
        sending = asyncio.create_task(fleet.appender.append("s", 0, [Record(b"k", b"1", 0)], timeout=600))
        await slow.reaches.wait()
        own.appender = slow._appender  # type: ignore[misc]
        await places.record("s", MigrationStep("copying", by="test", to="b"))
        await places.record("s", MigrationStep("held", by="test"))
        await asyncio.sleep(homes.LEASE_S + 0.1)
        assert await places.record("s", MigrationStep("written", by="test"))
        slow.go.set()
        with pytest.raises(OutcomeUnknown):
            await sending
        assert await _ends(own, other) == [1, 0]
        async with Producer(fleet.appender) as producer:
            assert not (await producer.send("s", [Record(b"k", b"1", 0)])).failed
        assert await _ends(own, other) == [1, 1]


async def test_an_append_that_ends_within_the_lease_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each hold would make duplicates of what was in flight."""
    monkeypatch.setattr(homes, "LEASE_S", 600.0)
    async with _fleet(tmp_path) as (fleet, places, own, _):
        slow = SlowAppender(own)
        own.appender = slow  # type: ignore[misc]
        sending = asyncio.create_task(fleet.appender.append("s", 0, [Record(b"k", b"1", 0)], timeout=600))
        await slow.reaches.wait()
        own.appender = slow._appender  # type: ignore[misc]
        await places.record("s", MigrationStep("copying", by="test", to="b"))
        slow.go.set()
        assert (await sending).last == 0


async def test_writers_go_on_when_the_migration_has_died(tmp_path: Path) -> None:
    """A hold of a machine that is gone would stop ingest for ever. Its late hand-over is void."""
    async with _fleet(tmp_path) as (fleet, places, own, other), Producer(fleet.appender) as producer:
        await places.record("s", MigrationStep("copying", by="test", to="b"))
        await places.record("s", MigrationStep("held", by="test"))
        epoch = places.home("s").epoch
        held = places._held_since["s"]
        assert not (await producer.send("s", [Record(b"k", b"1", 0)])).failed
        assert boot_seconds() - held >= homes.HOLD_S
        assert places.home("s").state == "copying"
        assert places.home("s").after(99, MigrationStep("written", "b", epoch, "late", 0)) is None
        assert await _ends(own, other) == [1, 0]


async def test_nobody_writes_while_it_is_not_known_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that cannot read the control topic does not know of a hand-over."""
    async with _fleet(tmp_path) as (fleet, places, _, _other):

        async def fails() -> None:
            raise Unavailable("away")

        monkeypatch.setattr(places, "refresh", fails)
        await asyncio.sleep(homes.LEASE_S + 0.1)
        with pytest.raises(Unavailable, match=r"penstock\.control cannot be read"):
            await fleet.appender.append("s", 0, [Record(b"k", b"1", 0)], timeout=0.2)
        monkeypatch.undo()


async def test_a_pipe_file_that_lacks_the_home_is_refused(tmp_path: Path) -> None:
    """A person removes `brokers` after a move: the stream would begin again, empty, on the fleet's own broker."""
    async with _fleet(tmp_path) as (_, places, _own, _other):
        for state in STEPS[:4]:
            assert await places.record("s", MigrationStep(state, by="test", to="b"))
    pipes = PipeFile.model_validate({"streams": {"s": {}}})
    with pytest.raises(UnsafeTopic, match="moved to broker b"):
        async with open_fleet_broker(f"log://{tmp_path / 'own'}", pipes):
            pass
    pipes = PipeFile.model_validate({"streams": {"s": {}}, "brokers": {"b": f"log://{tmp_path / 'b'}"}})
    async with open_fleet_broker(f"log://{tmp_path / 'own'}", pipes) as broker, Producer(broker.appender) as producer:
        assert not (await producer.send("s", [Record(None, b"1", 0)])).failed
    async with LogBroker.open(str(tmp_path / "b")) as other:
        assert await _ends(other) == [1]


async def test_an_error_that_nobody_expects_does_not_end_the_following(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a process refuses all events from then on, and its log does not say why."""

    async def fails() -> None:
        raise RuntimeError("nobody expects it")

    async with _fleet(tmp_path) as (fleet, places, _, _other):
        with monkeypatch.context() as patch, capture_logs() as lines:
            patch.setattr(places, "refresh", fails)
            async with asyncio.timeout(600):
                while not lines:
                    await asyncio.sleep(0.01)
        assert [line["error"] for line in lines] == ["RuntimeError('nobody expects it')"]
        assert not (await fleet.appender.append("s", 0, [Record(b"k", b"1", 0)], timeout=30)).failed


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (Unavailable("no node answers"), "broker b of the pipe file: no node answers"),
        (RuntimeError("nobody expects it"), "RuntimeError('nobody expects it')"),
    ],
)
async def test_a_writer_opens_the_broker_before_the_hand_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception, said: str
) -> None:
    """To open Kinesis takes a second or more: writers would wait for it after they were held. A failure is said once, and is
    no failure of the record, which goes to the old broker."""
    monkeypatch.setattr(brokers, "AGAIN_AFTER_S", 0.05)
    is_down, opened = True, asyncio.Event()
    async with _fleet(tmp_path) as (fleet, places, own, other), Producer(fleet.appender) as producer:

        @asynccontextmanager
        async def opening() -> AsyncIterator[Broker]:
            if is_down:
                raise failure
            opened.set()
            yield other

        monkeypatch.setattr(fleet.brokers, "_openings", {"b": opening})
        assert not (await producer.send("s", [Record(b"k", b"1", 0)])).failed
        assert not fleet.brokers._preparing, "the stream is not being moved"
        with capture_logs() as logs:
            await places.record("s", MigrationStep("copying", by="test", to="b"))
            for _ in range(3):
                assert not (await producer.send("s", [Record(b"k", b"1", 0)])).failed
                await asyncio.sleep(0.1)
        assert [line["error"] for line in logs if line["event"] == "move_not_prepared"] == [said]
        is_down = False
        async with asyncio.timeout(600):
            await opened.wait()
        assert await _ends(own, other) == [4, 0]


async def test_a_broker_is_not_prepared_for_a_move_that_was_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers, "AGAIN_AFTER_S", 0.05)
    is_down = True
    async with _fleet(tmp_path) as (fleet, places, _, other), Producer(fleet.appender) as producer:

        @asynccontextmanager
        async def opening() -> AsyncIterator[Broker]:
            if is_down:
                raise Unavailable("no node answers")
            yield other

        monkeypatch.setattr(fleet.brokers, "_openings", {"b": opening})
        await places.record("s", MigrationStep("copying", by="test", to="b"))
        assert not (await producer.send("s", [Record(b"k", b"1", 0)])).failed
        (preparing,) = fleet.brokers._preparing.values()
        await places.record("s", MigrationStep("undone", by="test"))
        async with asyncio.timeout(600):
            await preparing
        assert not fleet.brokers._preparing, "the next move to this broker would not be prepared"


async def test_the_other_broker_is_asked_again_and_again_until_the_move_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy takes hours: what was known of its topic at the beginning would be asked for at the hand-over, while writers are
    held. And a broker that is lost meanwhile would not be said before."""
    monkeypatch.setattr(brokers, "AGAIN_AFTER_S", 0.05)
    async with _fleet(tmp_path) as (fleet, places, _, other), Producer(fleet.appender) as producer:
        counted = asyncio.Semaphore(0)
        count = other.appender.partition_count

        async def partition_count(topic: str) -> int:
            counted.release()
            return await count(topic)

        monkeypatch.setattr(other.appender, "partition_count", partition_count)
        for _ in range(2):
            await places.record("s", MigrationStep("copying", by="test", to="b"))
            assert not (await producer.send("s", [Record(b"k", b"1", 0)])).failed
            async with asyncio.timeout(60):
                for _ in range(3):
                    await counted.acquire()
            (preparing,) = fleet.brokers._preparing.values()
            await places.record("s", MigrationStep("undone", by="test"))
            async with asyncio.timeout(60):
                await preparing
