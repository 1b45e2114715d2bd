"""Consumers beside trouble: damage, repair, topics made again, callers that fail."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from services.core.broker.contract import Start, TopicSpec
from services.core.broker.errors import (
    BrokerClosed,
    BrokerError,
    DataDamaged,
    NotOwner,
    OffsetOutOfRange,
    StorageFull,
    UnknownTopic,
)
from services.core.broker.log import LogBroker, retention
from services.core.broker.log.consumer import LogConsumer
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.membership import Timing
from services.core.broker.log.repair import repair
from services.core.broker.log.row_format import row_position
from services.core.broker.log.topic_store import TopicStore
from services.core.broker.record import TopicPartition
from tests.contract.traffic import ignore_revoke
from tests.unit.log.sample import records

TIMING = Timing(lease=2.0, drain=5.0)
DEADLINE = 600.0


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[LogBroker]:
    """An open log with the topics `orders` (two partitions) and `visits` (one)."""
    async with LogBroker.open(str(tmp_path), timing=TIMING) as opened:
        await opened.admin.create_topic(TopicSpec("orders", partitions=2))
        await opened.admin.create_topic(TopicSpec("visits", partitions=1))
        yield opened


@asynccontextmanager
async def member(broker: LogBroker, *topics: str, group: str = "g") -> AsyncIterator[LogConsumer]:
    """A member from the earliest record."""
    async with broker.consumer(group, topics, start="earliest", on_revoke=ignore_revoke) as consumer:
        yield consumer


async def read_until(consumer: LogConsumer, wanted: set[tuple[str, int, int]], *, fails: bool) -> list[BrokerError]:
    """Poll until these (topic, partition, number) came, exactly once each, and, if it `fails`, poll raised something.

    Gives what poll raised.
    """
    seen: list[tuple[str, int, int]] = []
    errors: list[BrokerError] = []
    async with asyncio.timeout(DEADLINE):
        while set(seen) != wanted or (fails and not errors):
            try:
                for batch in await consumer.poll(max_records=7, max_wait=0.1):
                    seen += [(batch.topic, batch.partition, int(r.value or b"")) for r in batch.records]
            except BrokerError as error:
                errors.append(error)
    assert len(seen) == len(set(seen))
    return errors


def damage_row(path: Path, topic: str, partition: int, offset: int) -> None:
    """Alter one row's data, as a disk would."""
    store = TopicStore.open(DataFolder(path), topic)
    try:
        run = store.connection.execute
        run("UPDATE batches SET data = zeroblob(length(data)) WHERE pos = ?", (row_position(partition, offset),))
    finally:
        store.close()


async def fill(broker: LogBroker, topic: str, partition: int, batches: int = 3) -> None:
    """Batches of ten."""
    for number in range(batches):
        await broker.appender.append(topic, partition, records(number * 10, 10), timeout=600)


async def test_damage_in_one_partition_is_named_and_the_others_go_on(broker: LogBroker, tmp_path: Path) -> None:
    """If it fails, one bad sector stops every stream, or is passed over."""
    for topic, partition in (("orders", 0), ("orders", 1), ("visits", 0)):
        await fill(broker, topic, partition)
    await asyncio.to_thread(damage_row, tmp_path, "orders", 1, 10)
    whole = {(t, p, n) for t, p in (("orders", 0), ("visits", 0)) for n in range(30)}
    async with member(broker, "orders", "visits") as consumer:
        errors = await read_until(consumer, whole | {("orders", 1, n) for n in range(10)}, fails=True)
        with pytest.raises(DataDamaged):
            await consumer.poll(max_records=10, max_wait=DEADLINE)
    (first, *_) = errors
    assert isinstance(first, DataDamaged)
    assert first.ranges == ((1, 10, 19),)


async def test_after_a_repair_the_loss_is_skipped(tmp_path: Path) -> None:
    """If it fails, a repaired topic stays stuck."""
    async with LogBroker.open(str(tmp_path), timing=TIMING) as broker:
        await broker.admin.create_topic(TopicSpec("orders", partitions=1))
        await fill(broker, "orders", 0)
    await asyncio.to_thread(damage_row, tmp_path, "orders", 0, 10)
    report = await asyncio.to_thread(repair, tmp_path, "orders")
    assert report.topics[0].lost_records == 10
    async with LogBroker.open(str(tmp_path), timing=TIMING) as broker:
        async with member(broker, "orders") as consumer:
            errors = await read_until(consumer, {("orders", 0, n) for n in (*range(10), *range(20, 30))}, fails=False)
            assert errors == []
        assert (await broker.appender.append("orders", 0, records(30, 1), timeout=600)).first == 30


async def test_a_whole_damaged_topic_does_not_stop_the_others(tmp_path: Path) -> None:
    """If it fails, one file that cannot be opened stops everything that the group reads."""
    async with LogBroker.open(str(tmp_path), timing=TIMING) as broker:
        for topic in ("orders", "visits"):
            await broker.admin.create_topic(TopicSpec(topic, partitions=1))
            await fill(broker, topic, 0)
        async with member(broker, "orders", "visits") as consumer:
            async with asyncio.timeout(DEADLINE):
                while len(consumer.assignment()) < 2:
                    await asyncio.sleep(0.01)
            await asyncio.to_thread((tmp_path / "topics" / "orders.hwm").write_bytes, b"x" * 64)
            errors = await read_until(consumer, {("visits", 0, n) for n in range(30)}, fails=True)
            assert all(isinstance(error, DataDamaged) for error in errors)
            with pytest.raises(BrokerError):
                await broker.appender.append("orders", 0, records(0, 1), timeout=600)
            await broker.appender.append("visits", 0, records(30, 1), timeout=600)


@pytest.mark.parametrize("start", ["earliest", "latest"])
@pytest.mark.parametrize("away", [0.0, 0.3, 2.0])
async def test_a_topic_made_anew_is_read_in_order_from_its_beginning(
    broker: LogBroker, tmp_path: Path, start: Start, away: float
) -> None:
    """If it fails, the first records of a topic that was made anew never reach a running consumer, or come behind later ones."""
    numbers: list[int] = []
    async with (
        asyncio.timeout(DEADLINE),
        LogBroker.open(str(tmp_path), timing=TIMING) as another,  # as an operator's process
        broker.consumer("g", ["visits"], start=start, on_revoke=ignore_revoke) as consumer,
    ):

        async def read() -> None:
            with suppress(OffsetOutOfRange, UnknownTopic):
                for batch in await consumer.poll(max_records=5, max_wait=0.1):
                    numbers.extend(int(record.value or b"") for record in batch.records)

        while not consumer.assignment():
            await asyncio.sleep(0.01)
        await another.appender.append("visits", 0, records(0, 30), timeout=600)
        while not numbers:
            await read()
        assert numbers == [0, 1, 2, 3, 4]
        await another.admin.delete_topic("visits")
        await asyncio.sleep(away)
        await another.admin.create_topic(TopicSpec("visits", partitions=1))
        await another.appender.append("visits", 0, records(100, 30), timeout=600)
        while len(new := [number for number in numbers if number >= 100]) < 30:
            await read()
        assert new == [*range(100, 130)]
        old = [number for number in numbers if number < 100]
        assert numbers == [*range(len(old)), *new], (
            "of the old one comes what was read already, and nothing behind the new"
        )
        await consumer.commit({TopicPartition("visits", 0): 29})
    assert await broker.admin.committed("g", "visits") == {0: 29}


async def test_an_error_of_an_earlier_ownership_is_not_raised(broker: LogBroker, tmp_path: Path) -> None:
    """If it fails, a topic that was created again stays paused for an error of the old one, and its events wait for ever."""
    for topic, partition in (("orders", 0), ("orders", 1), ("visits", 0)):
        await fill(broker, topic, partition, 1)
    await asyncio.to_thread(damage_row, tmp_path, "orders", 1, 0)
    async with member(broker, "orders", "visits") as consumer, asyncio.timeout(DEADLINE):
        while len(consumer.assignment()) < 3:
            await asyncio.sleep(0.01)
        assert await consumer.poll(max_records=100, max_wait=DEADLINE)  # the error of orders[1] waits for the next poll
        await broker.admin.delete_topic("orders")
        while len(consumer.assignment()) > 1:
            await asyncio.sleep(0.01)
        await broker.admin.create_topic(TopicSpec("orders", partitions=2))
        await fill(broker, "orders", 1, 1)
        errors = await read_until(consumer, {("orders", 1, n) for n in range(10)}, fails=False)
    assert not [error for error in errors if isinstance(error, DataDamaged)]


async def test_a_failing_on_revoke_is_raised_and_frees_the_partitions(broker: LogBroker) -> None:
    """If it fails, a fault in a service's drain is swallowed, or blocks its partitions for ever."""

    async def fail(partitions: frozenset[TopicPartition]) -> None:
        raise RuntimeError("cannot drain")

    with pytest.raises(RuntimeError, match="cannot drain"):
        async with broker.consumer("g", ["visits"], start="earliest", on_revoke=fail) as consumer:
            assert consumer.assignment()
    async with member(broker, "visits") as consumer:
        assert consumer.assignment()


async def test_a_slow_on_revoke_is_cut_off(tmp_path: Path) -> None:
    """If it fails, one stuck instance holds its partitions for ever."""
    never = asyncio.Event()

    async def hang(partitions: frozenset[TopicPartition]) -> None:
        await never.wait()

    async with LogBroker.open(str(tmp_path), timing=Timing(lease=2.0, drain=0.1)) as broker:
        await broker.admin.create_topic(TopicSpec("visits", partitions=1))
        async with asyncio.timeout(DEADLINE):
            async with broker.consumer("g", ["visits"], start="earliest", on_revoke=hang):
                pass


async def test_consumers_go_on_while_the_disk_is_too_full_for_appends(
    broker: LogBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, a full disk also stops delivery, which is what could empty it."""
    await fill(broker, "visits", 0)
    async with member(broker, "visits") as consumer:
        monkeypatch.setattr("services.core.broker.log.topic_writer._RESERVE", 1 << 60)
        monkeypatch.setattr("services.core.broker.log.topic_writer._RESERVE_SHARE", 1)
        with pytest.raises(StorageFull):
            await broker.appender.append("visits", 0, records(30, 1), timeout=600)
        batches = await consumer.poll(max_records=100, max_wait=DEADLINE)
        await consumer.commit({batch.source: batch.offsets[-1] for batch in batches})
    assert await broker.admin.committed("g", "visits") == {0: 29}


async def test_leaving_twice_in_a_row_leaves_nobody_behind(broker: LogBroker) -> None:
    """If it fails, a member that left is still counted, and its share is owned by nobody until its lease ends."""
    for _ in range(10):
        async with member(broker, "orders") as consumer:
            assert len(consumer.assignment()) == 2


async def test_commits_of_partitions_never_owned_are_refused_and_the_others_stored(broker: LogBroker) -> None:
    """If it fails, one wrong partition loses the progress of all others."""
    await fill(broker, "visits", 0)
    async with member(broker, "visits") as consumer:
        await consumer.poll(max_records=8, max_wait=DEADLINE)
        with pytest.raises(NotOwner) as raised:
            await consumer.commit({TopicPartition("orders", 1): 3, TopicPartition("visits", 0): 7})
    assert raised.value.partitions == {("orders", 1)}
    assert await broker.admin.committed("g", "visits") == {0: 7}


async def test_a_commit_of_what_was_not_polled_is_refused(broker: LogBroker) -> None:
    """If it fails, a caller's stale offset passes over records that nobody has seen."""
    await fill(broker, "visits", 0)
    async with member(broker, "visits") as consumer:
        await consumer.poll(max_records=8, max_wait=DEADLINE)
        with pytest.raises(NotOwner):
            await consumer.commit({TopicPartition("visits", 0): 8})
        await consumer.commit({TopicPartition("visits", 0): 7})
    assert await broker.admin.committed("g", "visits") == {0: 7}


async def test_latest_means_the_same_after_a_crash_before_the_first_commit(tmp_path: Path) -> None:
    """If it fails, what arrived between a consumer's first start and its crash is never delivered."""
    async with LogBroker.open(str(tmp_path), timing=TIMING) as broker:
        await broker.admin.create_topic(TopicSpec("visits", partitions=1))
        await fill(broker, "visits", 0, batches=1)
        async with broker.consumer("g", ["visits"], start="latest", on_revoke=ignore_revoke):
            pass
        await broker.appender.append("visits", 0, records(10, 10), timeout=600)
        async with broker.consumer("g", ["visits"], start="latest", on_revoke=ignore_revoke) as consumer:
            (batch,) = await consumer.poll(max_records=100, max_wait=DEADLINE)
    assert list(batch.offsets) == list(range(10, 20))


async def test_a_closed_broker_says_so(tmp_path: Path) -> None:
    """If it fails, a late append during shutdown hangs or dies with an unrelated error."""
    async with LogBroker.open(str(tmp_path)) as broker:
        await broker.admin.create_topic(TopicSpec("visits", partitions=1))
        await fill(broker, "visits", 0)
    with pytest.raises(BrokerClosed):
        await broker.appender.append("visits", 0, records(0, 1), timeout=600)


async def test_retention_runs_by_itself(tmp_path: Path) -> None:
    """If it fails, limits on topics do nothing until somebody calls something."""
    async with LogBroker.open(str(tmp_path), retention_seconds=0.05) as broker:
        await broker.admin.create_topic(TopicSpec("visits", partitions=1, retention_bytes=1))
        await fill(broker, "visits", 0)
        async with asyncio.timeout(DEADLINE):
            while (await broker.reader.describe("visits"))[0].start != 20:
                await asyncio.sleep(0.02)


async def test_retention_ends_with_the_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a pass goes on in a folder that its owner removes, or reports that it failed there; or a long pass holds up the end
    of a process."""
    begun, ended, loop = asyncio.Event(), list[str](), asyncio.get_running_loop()

    def enforce(
        _folder: DataFolder, topic: str, _now_ms: int, stop: threading.Event, *, system_ms: int
    ) -> dict[int, int]:
        loop.call_soon_threadsafe(begun.set)
        if stop.wait(DEADLINE):
            ended.append(topic)
        return {}

    monkeypatch.setattr(retention, "enforce", enforce)
    async with LogBroker.open(str(tmp_path), retention_seconds=0.05) as broker:
        for name in ("one", "two"):
            await broker.admin.create_topic(TopicSpec(name, partitions=1))
        async with asyncio.timeout(DEADLINE):
            await begun.wait()
    assert len(ended) == 1
