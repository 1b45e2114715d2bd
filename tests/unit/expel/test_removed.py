"""What waits for a destination that the pipe file has removed: it goes where the file says, all of it, and on record."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from prometheus_client import REGISTRY

from services.core.audit import Entry
from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError, Unavailable
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.broker.retry import AppendPolicy
from services.core.pipe_file.pipes import PipeFile, Removed, load_pipes
from services.core.pipe_file.topic_names import AUDIT
from services.core.provision import ensure_topics
from services.core.undelivered import dead_letter
from services.core.undelivered.retry_state import unwrap
from services.core.undelivered.waiting import Bookmark, find_waiting
from services.expel.dedup import RetryTopicFilter
from services.expel.removed import RemovedLane
from services.expel.settings import ExpelSettings
from tests.support.ports import free_port
from tests.support.waiting_events import store, stored, waiting_event
from tests.unit.expel.fake_broker import FakeBroker, FakeConsumer
from tests.unit.expel.receiver import wait_until
from tests.unit.expel.running_expel import running_expel

HOOK = {"url": "https://example.org/"}
PIPES = PipeFile.model_validate(
    {
        "streams": {"s": {}},
        "pipes": {"late": {"sources": ["s"], "destinations": [{"name": "new", "webhook": HOOK}]}},
        "removed": {"late/old": {"deliver_to": "late/new"}, "gone/old": {"deliver_to": "late/new"}},
    }
)
PATIENT = AppendPolicy(deadline=10.0, append_timeout=10.0)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with open_broker(f"log://{tmp_path}/log") as opened:
        await ensure_topics(opened.admin, PIPES)
        for topic in ("late.retry", "late.parked"):
            records = [waiting_event(lane, n, due=n) for n in range(3) for lane in ("late/old", "late/new")]
            await store(opened, topic, records)
        yield opened


@asynccontextmanager
async def run_removed(broker: Broker, lane: str = "late/old", **choice: str) -> AsyncIterator[None]:
    async with Producer(broker.appender, policy=PATIENT) as producer:
        stopping = asyncio.Event()
        running = asyncio.create_task(RemovedLane(broker, producer, lane, Removed(**choice)).run(stopping, 5.0))
        try:
            yield
        finally:
            stopping.set()
            await running


async def nothing_waits(broker: Broker) -> None:
    async with asyncio.timeout(600):
        while (await find_waiting(broker, {"late/new"}, Bookmark())).unclaimed:
            await asyncio.sleep(0.02)


def count(action: str) -> float:
    labels = {"pipe": "late", "destination": "old", "action": action}
    return REGISTRY.get_sample_value("penstock_expel_events_removed_total", labels) or 0.0


async def test_delivered_to_the_new_name(broker: Broker) -> None:
    """Broken: a renamed destination never gets what was parked or retried under its old name, or gets it altered."""
    before = count("delivered_elsewhere")
    async with run_removed(broker, deliver_to="late/new"):
        await nothing_waits(broker)
    records = (await stored(broker, "late.retry"))[6:]
    assert {unwrap(record)[1].destination for record in records} == {"new"}
    kept = [unwrap(waiting_event("late/old", n, due=n))[0] for n in range(3)]
    assert sorted((unwrap(record)[0] for record in records), key=lambda one: one.headers) == sorted(
        kept * 2, key=lambda one: one.headers
    )
    assert {(state.attempts, state.rounds) for state in (unwrap(record)[1] for record in records)} == {(4, 1)}
    assert count("delivered_elsewhere") - before == 6


async def test_from_a_pipe_that_is_gone(broker: Broker) -> None:
    """Broken: with the pipe itself gone, its topics are read by nobody."""
    await store(broker, "gone.parked", [waiting_event("gone/old", 1)])
    async with run_removed(broker, "gone/old", deliver_to="late/new"):
        async with asyncio.timeout(600):
            while len(found := await stored(broker, "late.retry")) < 7:
                await asyncio.sleep(0.02)
    assert unwrap(found[6])[1].pipe == "late"


async def test_buried_with_the_reason(broker: Broker) -> None:
    """Broken: what the operator wants kept as dead letters is not there, or nobody knows why."""
    before = count("buried")
    async with run_removed(broker, bury="they left us"):
        await nothing_waits(broker)
    letters = await stored(broker, "late.dead")
    assert {letter.header(dead_letter.REASON) for letter in letters} == {b"destination_removed"}
    assert {letter.header(dead_letter.DETAIL) for letter in letters} == {b"they left us"}
    assert sorted(letter.header(dead_letter.SOURCE) or b"" for letter in letters) == sorted(
        b"s:0:%d" % n for n in range(3) for _ in range(2)
    )
    assert dead_letter.strip(letters[0]) == unwrap(waiting_event("late/old", 0, due=0))[0]
    assert count("buried") - before == 6


async def test_dropped_on_record(broker: Broker) -> None:
    """Broken: events vanish and nobody can say which, when and why."""
    before = count("dropped")
    async with run_removed(broker, drop="agreed with them"):
        await nothing_waits(broker)
    entries = [msgspec.json.decode(record.value or b"", type=Entry) for record in await stored(broker, AUDIT)]
    assert {(entry.action, entry.filters["because"]) for entry in entries} == {("drop", "agreed with them")}
    assert sorted((entry.topic, tuple(entry.ranges)) for entry in entries) == [
        ("late.parked", ((0, 0), (2, 2), (4, 4))),
        ("late.retry", ((0, 0), (2, 2), (4, 4))),
    ]
    assert count("dropped") - before == 6
    assert (await stored(broker, "late.dead"), len(await stored(broker, "late.retry"))) == ([], 6)


@pytest.mark.parametrize("choice", [{"deliver_to": "late/new"}, {"bury": "why"}, {"drop": "why"}])
async def test_nothing_is_passed_over_before_it_is_durable(choice: dict[str, str]) -> None:
    """Broken: an outage of the broker at the wrong moment loses what waited."""
    fake = FakeBroker({"late.retry": 1, "late.parked": 1, "late.dead": 1, AUDIT: 1})
    (parked,) = (source for source in fake.stored if source.topic == "late.parked")
    fake.stored[parked] += [waiting_event("late/old", n) for n in range(3)]
    fake.append_error = Unavailable("down")
    error: BrokerError | None = fake.append_error
    async with run_removed(fake, **choice):  # type: ignore[arg-type]
        await wait_until(lambda: len(fake.consumers) == 1 and fake.consumers[0].polls > 0)
        await asyncio.sleep(0.3)
        assert (fake.commits, error) == ([], fake.append_error)
        fake.append_error = None
        await wait_until(lambda: fake.committed.get(("late.old", parked)) == 2)
    written = sum(len(records) for source, records in fake.stored.items() if source != parked)
    assert written == (1 if "drop" in choice else 3)


async def test_what_left_while_others_were_written_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a topic is made anew while events are written on, and the new one's first events are passed over after a crash."""
    fake = FakeBroker({"late.retry": 1, "late.parked": 1, "late.dead": 1})
    back, parked, dead = fake.stored
    fake.stored[back].append(waiting_event("late/old", 0))
    fake.stored[parked] += [waiting_event("late/old", n) for n in (1, 2, 3)]
    fake.append_error = Unavailable("down")
    monkeypatch.setattr(FakeConsumer, "poll", _poll_all)
    buried_at_commit: list[list[bytes | None]] = []

    async def commit(_consumer: FakeConsumer, processed: Mapping[TopicPartition, int]) -> None:
        if parked in processed:
            buried_at_commit.append([record.header("ce_id") for record in fake.stored[dead]])

    monkeypatch.setattr(FakeConsumer, "commit", commit)
    async with run_removed(fake, bury="why"):  # type: ignore[arg-type]
        await wait_until(lambda: bool(fake.consumers) and fake.consumers[0].positions[parked] == 3)
        consumer = fake.consumers[0]
        await consumer.on_revoke(frozenset({parked}))
        fake.stored[parked] = [waiting_event("late/old", n) for n in (7, 8, 9)]
        consumer.positions[parked] = 0
        fake.append_error = None
        await wait_until(lambda: bool(buried_at_commit))
    assert {b"e7", b"e8", b"e9"} <= set(buried_at_commit[0])


async def _poll_all(consumer: FakeConsumer, *, max_records: int, max_wait: float) -> list[Batch]:
    await asyncio.sleep(0.001)
    found = []
    for source, position in consumer.positions.items():
        if records := consumer.broker.stored[source][position : position + max_records]:
            consumer.positions[source] += len(records)
            found.append(Batch(*source, range(position, position + len(records)), records))
    return found


def test_what_nobody_will_deliver_is_seen() -> None:
    """Broken: events for a destination that no file names are passed over in silence."""
    records = [waiting_event(lane, n) for n, lane in enumerate(("late/new", "late/old", "late/lost", "late/lost"))]
    returned = RetryTopicFilter("late", "new", frozenset({"new", "old"}))
    assert returned.sort(Batch("late.retry", 0, range(4), records)).unclaimed == {"lost": 2}
    assert returned.sort(Batch("late.retry", 0, range(4, 8), records)).unclaimed == {"lost": 2}
    assert RetryTopicFilter("late", "hook").sort(Batch("late.retry", 0, range(4), records)).unclaimed == {}


async def test_a_stream_gets_what_waited_when_it_was_a_webhook(tmp_path: Path) -> None:
    """Broken: a destination that becomes a stream leaves what was retried or parked behind, for ever. Or the cluster of another
    destination holds it up while it is down."""
    path = tmp_path / "pipes.yaml"
    path.write_text(
        f"brokers: {{erp: 'kafka://127.0.0.1:{free_port()}'}}\nstreams: {{s: {{}}, t: {{}}}}\npipes:\n"
        "  late: {sources: [s], destinations: [{name: new, stream: t}, {name: erp, topic: {name: bills, on: erp}}]}\n"
        "removed: {late/former: {bury: it is over}}\n"
    )
    url = f"log://{tmp_path}/log"
    settings = ExpelSettings(pipes=path, broker=url, drain="2s")
    async with open_broker(url) as broker:
        await ensure_topics(broker.admin, PIPES)
        await ensure_topics(broker.admin, PipeFile.model_validate({"streams": {"t": {"partitions": 1}}}))
        await store(broker, "late.retry", [waiting_event("late/new", 1), waiting_event("late/former", 2)])
        await store(broker, "late.parked", [waiting_event("late/new", 3)])
        async with running_expel(settings):
            async with asyncio.timeout(600):
                while len(found := await stored(broker, "t")) < 2 or not await stored(broker, "late.dead"):
                    await asyncio.sleep(0.02)
    kept = [unwrap(waiting_event("late/new", n))[0] for n in (1, 3)]
    assert sorted(found, key=_by_id) == sorted(kept, key=_by_id)


def _by_id(record: Record) -> bytes:
    return record.header("ce_id") or b""


async def test_a_removed_pipe_is_found_lane_by_lane(tmp_path: Path) -> None:
    """Broken: one line removes a pipe, and what waits for its destinations stays, or is taken from one that has delivered it."""
    path = tmp_path / "pipes.yaml"
    path.write_text(
        "streams: {s: {}, t: {}}\npipes:\n  late: {sources: [s], destinations: [{name: new, stream: t}]}\n"
        "removed: {gone: {bury: it is over}, gone/other: {drop: agreed}}\n"
    )
    url = f"log://{tmp_path}/log"
    settings = ExpelSettings(pipes=path, broker=url, drain="2s")
    async with open_broker(url) as broker:
        await ensure_topics(broker.admin, await asyncio.to_thread(load_pipes, path))
        lanes = ("gone/old", "gone/other", "gone/done")
        await store(broker, "gone.retry", [waiting_event(lane, n) for n, lane in enumerate(lanes)])
        await broker.admin.set_committed("gone.done", "gone.retry", {0: 2})
        async with running_expel(settings):
            async with asyncio.timeout(600):
                while not (letters := await stored(broker, "gone.dead")) or not await stored(broker, AUDIT):
                    await asyncio.sleep(0.02)
                while (await find_waiting(broker, {"late/new"}, Bookmark())).unclaimed:
                    await asyncio.sleep(0.02)
        (entry,) = await stored(broker, AUDIT)
    assert [letter.header(dead_letter.DESTINATION) for letter in letters] == [b"old"]
    assert msgspec.json.decode(entry.value or b"", type=Entry).filters["because"] == "agreed"


async def test_expel_takes_over_by_itself(tmp_path: Path) -> None:
    """Broken: nobody runs `penstock up` or `apply` before expel, as on Kubernetes, and a new name gets the whole stream again."""
    path = tmp_path / "pipes.yaml"
    path.write_text(
        "streams: {s: {partitions: 1}, t: {partitions: 1}}\n"
        "pipes:\n  late: {sources: [s], destinations: [{name: new, renamed_from: old, stream: t}]}\n"
    )
    url = f"log://{tmp_path}/log"
    settings = ExpelSettings(pipes=path, broker=url, drain="2s")
    async with open_broker(url) as broker:
        await ensure_topics(broker.admin, await asyncio.to_thread(load_pipes, path))
        await store(broker, "s", [waiting_event("any/one", n) for n in range(5)])
        await broker.admin.set_committed("late.old", "s", {0: 2})
        async with running_expel(settings):
            async with asyncio.timeout(600):
                while len(found := await stored(broker, "t")) < 2:
                    await asyncio.sleep(0.02)
        assert sorted(map(_by_id, found)) == [b"e3", b"e4"]
        async with running_expel(settings):  # the line stays in the file
            await store(broker, "s", [waiting_event("any/one", 5)])
            async with asyncio.timeout(600):
                while len(found := await stored(broker, "t")) < 3:
                    await asyncio.sleep(0.02)
        assert sorted(map(_by_id, found)) == [b"e3", b"e4", b"e5"]
