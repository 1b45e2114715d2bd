"""Migrations of a live stream between the embedded log and Kinesis, killed on their way, against the emulator."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from services.core.aws_emulator import AwsEmulator, kinesis_url
from services.core.broker.connect import open_broker
from services.core.broker.errors import OffsetOutOfRange
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.broker.several.broker import SeveralBrokers
from services.fleet.migrate.steps import Migration
from services.fleet.problem import CommandFailed
from tests.contract.traffic import ignore_revoke
from tests.support.kafka import unique_name
from tests.support.kinesis_limits import Faults, KinesisLimits
from tests.support.migrations import GROUP, KEYS, STREAM, World, run_history, shorten_times


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_times(monkeypatch)


@pytest.fixture
def second(kinesis_emulator: AwsEmulator) -> str:
    """The URL of Kinesis, with a prefix of its own."""
    return f"{kinesis_emulator.url}&prefix={unique_name('kin')}."


@pytest.fixture
async def world(second: str, tmp_path: Path) -> World:
    """A fleet on a log, and Kinesis beside it."""
    found = World(f"log://{tmp_path / 'own'}", second)
    await found.set_up()
    return found


async def test_a_stream_moves_there_while_it_is_written_and_read(world: World) -> None:
    """Without a kill only an append in doubt is there twice, as between logs."""
    assert await run_history(world, seed=0, kills=0, back=False) <= 2 * 2 * KEYS
    assert sum(map(len, world.acknowledged.values())) > 0


@pytest.mark.parametrize(("seed", "back"), [(1, False), (2, True)])
async def test_killed_at_any_step(world: World, seed: int, back: bool) -> None:
    """Each step may be repeated, in both directions: nothing is lost, keys stay in order, what was in doubt is there twice."""
    assert await run_history(world, seed, kills=4, back=back) <= 2 * KEYS * 8 * (1 + back)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3, 13))
async def test_killed_at_any_step_in_many_histories(world: World, seed: int) -> None:
    """As above."""
    assert await run_history(world, seed, kills=6, back=True) <= 2 * KEYS * 24


@asynccontextmanager
async def _bad_weather(faults: Faults, chance: random.Random) -> AsyncIterator[None]:
    """Connections are cut in the middle of requests."""

    async def blow() -> None:
        while True:
            await asyncio.sleep(chance.uniform(2.0, 5.0))
            faults.down = True
            await asyncio.sleep(chance.uniform(0.05, 0.2))
            faults.down = False

    blowing = asyncio.create_task(blow())
    try:
        yield
    finally:
        blowing.cancel()
        await asyncio.wait([blowing])
        faults.down = False


async def test_answers_that_are_lost(
    kinesis_emulator: AwsEmulator, kinesis_limits: KinesisLimits, tmp_path: Path
) -> None:
    """An append of the copy is stored, and nobody knows; its repeat is a second copy. The service has its limits."""
    url = f"{kinesis_url(kinesis_limits.endpoint, kinesis_emulator.dynamodb)}&prefix={unique_name('kin')}."
    world = World(f"log://{tmp_path / 'own'}", url)
    await world.set_up()
    async with _bad_weather(kinesis_limits.faults, random.Random(1)):
        await run_history(world, 5, kills=1, back=True)


async def _fill(broker: SeveralBrokers, numbers: range) -> None:
    async with Producer(broker.appender) as producer:
        records = [Record(None, b"%d" % number, 0) for number in numbers]
        (await producer.send_to(STREAM, {0: records})).raise_first()


async def _next(broker: SeveralBrokers) -> tuple[int, bytes | None]:
    """The next event of the group in partition 0, and its offset."""
    at = (await broker.admin.positions(GROUP, STREAM))[0]
    batch = await broker.reader.read(STREAM, 0, at, max_records=1)
    assert batch is not None
    return batch.offsets[0], batch.records[0].value


async def _read_all(broker: SeveralBrokers) -> list[int]:
    """The offsets of partition 0."""
    offset, found = (await broker.reader.describe(STREAM))[0].start, list[int]()
    while (batch := await broker.reader.read(STREAM, 0, offset, max_records=100)) is not None:
        found += batch.offsets
        offset = found[-1] + 1
    return found


async def test_groups_continue_at_their_events_and_no_offset_names_two(world: World) -> None:
    """There, back, and there again. Kinesis has no offset where a partition is empty, and the group may not skip what comes."""
    async with world.process() as (broker, places):
        await _fill(broker, range(10))
        await broker.admin.set_committed(GROUP, STREAM, {0: 6, 1: -1})
        names = await _read_all(broker)
        assert names == list(range(10))
        for to in ("second", "default", "second"):
            migration = Migration(broker, places, world.load, STREAM, "test")
            result = await migration.run(to)
            assert (result.events, result.groups, result.missing) == (10, 1, 0)
            offset, value = await _next(broker)
            assert value == b"7"
            there = await _read_all(broker)
            assert there[7] == offset
            assert there == sorted(there)
            assert names[-1] < there[0]
            with pytest.raises(OffsetOutOfRange) as refused:
                await broker.reader.read(STREAM, 0, names[3], max_records=1)
            assert names[-1] < refused.value.start <= there[0], (
                "who looks for a former offset begins with the first event"
            )
            assert (await broker.admin.positions(GROUP, STREAM)).keys() == {0, 1}
            names = there
            await migration.finish()
        await _deliver_the_rest(broker)


async def test_a_stream_moves_from_region_to_region(kinesis_emulator: AwsEmulator, tmp_path: Path) -> None:
    """Both count in sequence numbers: only what is added to those of the second keeps them apart, also in shards that are made
    later."""
    first, second = (f"{kinesis_emulator.url}&prefix={unique_name('kin')}." for _ in range(2))
    world = World(f"log://{tmp_path / 'own'}", first, "second")
    world.pipes = world.pipes.model_copy(update={"brokers": {"second": first, "third": second}})
    await world.set_up()
    async with world.process() as (broker, places):
        await _fill(broker, range(10))
        former = await _read_all(broker)
        await broker.admin.set_committed(GROUP, STREAM, {0: former[6]})
        result = await Migration(broker, places, world.load, STREAM, "test").run("third")
        assert (result.events, result.groups, result.missing) == (10, 1, 0)
        there = await _read_all(broker)
        assert former[-1] < there[0]
        assert await _next(broker) == (there[7], b"7")
        await broker.admin.add_partitions(STREAM, 4)
        await _fill(broker, range(20, 21))
        stored = await broker.reader.describe(STREAM)
        assert any(held.start < held.end for number, held in stored.items() if number > 1)
        assert all(held.start > former[-1] for held in stored.values())
        await Migration(broker, places, world.load, STREAM, "test").finish()


async def _deliver_the_rest(broker: SeveralBrokers) -> None:
    async with broker.consumer(GROUP, [STREAM], start="latest", on_revoke=ignore_revoke) as consumer:
        async with Producer(broker.appender) as producer:
            (await producer.send_to(STREAM, {1: [Record(None, b"first", 0)]})).raise_first()
        got = set[bytes | None]()
        async with asyncio.timeout(300):
            while len(got) < 4:
                for batch in await consumer.poll(max_records=10, max_wait=1.0):
                    got |= {record.value for record in batch.records}
                    await consumer.commit({batch.source: batch.offsets[-1]})
        assert got == {b"7", b"8", b"9", b"first"}


async def test_a_stream_that_was_born_there_comes_home(second: str, tmp_path: Path) -> None:
    """A group that has begun, and has processed nothing, has no position on Kinesis: it begins with the oldest event."""
    world = World(f"log://{tmp_path / 'own'}", second, "second")
    await world.set_up()

    async with world.process() as (broker, places):
        await _fill(broker, range(5))
        async with broker.consumer(GROUP, [STREAM], start="earliest", on_revoke=ignore_revoke) as consumer:
            async with asyncio.timeout(300):
                while not await consumer.poll(max_records=10, max_wait=1.0):
                    pass
        result = await Migration(broker, places, world.load, STREAM, "test").run("default")
        assert (result.events, result.groups) == (5, 1)
        assert (await _next(broker))[1] == b"0"


@pytest.mark.parametrize("end", ["finish", "back"])
async def test_what_came_late_to_the_former_topic_is_stored(world: World, second: str, end: str) -> None:
    """A put whose answer was lost is stored after the hand-over, on Kinesis or on the log."""
    async with world.process() as (broker, places):
        await _fill(broker, range(3))
        await Migration(broker, places, world.load, STREAM, "test").run("second")
        if end == "finish":
            await Migration(broker, places, world.load, STREAM, "test").run("default")
        late = second if end == "finish" else world.url
        async with open_broker(late) as former:
            await former.appender.append(STREAM, 0, [Record(None, b"late", 0)], timeout=600)
        migration = Migration(broker, places, world.load, STREAM, "test")
        assert (await (migration.finish() if end == "finish" else migration.run("default"))).late == 1
        found = await _read_all(broker)
        batch = await broker.reader.read(STREAM, 0, found[-1], max_records=1)
        assert batch is not None
        assert batch.records[0].value == b"late"


async def test_a_stream_that_was_split_is_refused(second: str, tmp_path: Path) -> None:
    """A shard may have the events of several partitions then, and nobody knows which."""
    world = World(f"log://{tmp_path / 'own'}", second, "second")
    await world.set_up()
    async with world.process() as (broker, places):
        await broker.admin.add_partitions(STREAM, 4)
        with pytest.raises(CommandFailed, match="it was split or merged"):
            await Migration(broker, places, world.load, STREAM, "test").run("default")
        assert places.home(STREAM).state is None


async def test_a_stream_that_is_split_while_it_is_copied_stays(second: str, tmp_path: Path) -> None:
    """The migration says so, and is undone."""
    world = World(f"log://{tmp_path / 'own'}", second, "second")
    await world.set_up()
    async with world.process() as (broker, places):
        await _fill(broker, range(3))
        migration = Migration(broker, places, world.load, STREAM, "test")
        await migration._begin("default")
        await broker.admin.add_partitions(STREAM, 4)
        with pytest.raises(CommandFailed, match="was split, merged or has grown meanwhile"):
            await migration.run("default")
        await migration.undo()
        assert places.home(STREAM).writers == "second"


async def test_an_event_that_is_too_large_for_kinesis_is_named(world: World) -> None:
    """The stream stays where it is."""
    async with world.process() as (broker, places):
        async with Producer(broker.appender) as producer:
            (await producer.send_to(STREAM, {0: [Record(None, bytes(1_048_000), 0)]})).raise_first()
        migration = Migration(broker, places, world.load, STREAM, "test")
        with pytest.raises(CommandFailed, match="does not accept an event"):
            await migration.run("second")
        await migration.undo()
        assert places.home(STREAM).writers == "default"


async def test_a_writer_that_was_held_too_long_goes_on(world: World) -> None:
    """The command dies when writers are held: they wait for the longer time of that record, and then go on by themselves."""
    async with world.process() as (broker, places), world.process() as (writer, _):

        def die(step: str) -> None:
            if step == "drain":
                raise asyncio.CancelledError

        with suppress(asyncio.CancelledError):
            await Migration(broker, places, world.load, STREAM, "test", before=die).run("second")
        assert places.home(STREAM).state == "held"
        began = asyncio.get_running_loop().time()
        await _fill(writer, range(3))
        assert asyncio.get_running_loop().time() - began > 5.0
        await places.refresh()
        assert places.home(STREAM).state == "copying"
        assert (await Migration(broker, places, world.load, STREAM, "test").run("second")).events == 3
