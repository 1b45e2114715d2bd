"""Topics that others write, on a real Kafka: read to a webhook, with the loss table, dead letters, redrive and story right.

The records are those of clients as people have them: plain ones as of kcat, with and without keys, by a client in Python; and
`java_writers`: Kafka's producer in Java with each compression and with transactions, Connect's JSON converter, and Debezium's
connector at a real PostgreSQL.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener
from aiokafka import TopicPartition as KafkaPartition
from aiokafka.admin import NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.structs import OffsetAndMetadata

from services.core.broker.connect import BadBrokerUrl, open_broker
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError, UnknownTopic, UnsafeTopic
from services.core.broker.existing import target_name
from services.core.broker.producer import Producer
from services.core.event import ORIGIN, Origin
from services.core.fleet_broker import open_fleet_broker
from services.core.jvm.kafka import KafkaCluster
from services.core.ledger.report import TELEMETRY, decode_report
from services.core.pipe_file.existing_topics import existing_topics
from services.core.pipe_file.pipes import PipeFile, load_pipes
from services.core.pipe_file.topic_names import dead_letter_topic
from services.core.provision import NoSuchTopics, ensure_topics
from services.core.story.find import find_story, make_scope
from services.core.story.search import Limits
from services.core.undelivered.dead_letter import DeadLetter
from services.expel.webhook.sender import ITEM_FAILED
from services.fleet.dead.audit import Auditor
from services.fleet.dead.found import DeadLetterSearch, Filter
from services.fleet.dead.redrive import Redrive, RedriveTargets
from services.observer.ledger.flow import read_flow
from services.observer.ledger.settlement import Row
from services.observer.ledger.table import Table
from tests.contract.traffic import ignore_revoke
from tests.integration.expel_process import Expel, decide, hook, kill_at_end, wait_parked, wait_replayed
from tests.integration.retrier_process import RetrierProcess
from tests.integration.retrier_process import kill_at_end as kill_retrier_at_end
from tests.support.java_writers import CODECS
from tests.support.kafka import describe_partitions, make_topic, open_admin, unique_name
from tests.support.postgres import Postgres
from tests.unit.expel.receiver import DEADLINE, Received, open_receiver

pytestmark = pytest.mark.kafka

CONNECT = {
    "schema": {"type": "struct", "fields": [{"type": "int32", "optional": False, "field": "id"}], "optional": False},
    "payload": {"id": 7},
}
"""As the converter writes it."""


FROM_JAVA = 5 * len(CODECS) + 2 + 1 + 4
"""Records with each compression, by the converter, in a transaction, and by Debezium, the last of them a tombstone."""


@pytest.fixture(scope="module")
def database() -> Iterator[Postgres]:
    # Not in pytest's folder: only its owner may enter that, and the server is another user.
    with TemporaryDirectory(prefix="penstock-postgres-") as folder:
        server = Postgres(Path(folder), "wal_level=logical")
        server.start()
        yield server
        server.stop()


class ForeignExpel(Expel):
    """Expel with a pipe file of its own."""

    pipe_file: dict[str, object]

    def write_pipes(self) -> Path:
        path = self.folder / "pipes.yaml"
        path.write_bytes(orjson.dumps(self.pipe_file))
        return path


async def produce(bootstrap: str, topic: str, database: Postgres) -> int:
    """As others do. Returns the number of committed records."""
    count = 0
    for codec in (None, "gzip", "snappy", "lz4", "zstd"):
        async with AIOKafkaProducer(bootstrap_servers=bootstrap, compression_type=codec) as producer:
            for number in range(5):
                key = None if number % 2 else b"k%d" % number
                await producer.send(topic, b'{"codec": "%s", "n": %d}' % (str(codec).encode(), number), key)
                count += 1
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        await producer.send_and_wait(topic, b"no json", headers=[("invoice-id", b"plain-text")])
        await producer.send_and_wait(topic, b"{}", headers=[("invoice-id", b"\xff")])
        await producer.send_and_wait(topic, b'{"refused": true}', headers=[("invoice-id", b"refused-1")])
    writers = [sys.executable, "-m", "tests.support.java_writers", bootstrap, topic, database.url]
    done = await asyncio.to_thread(subprocess.run, writers, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["c", "u", "d", "null"]
    return count + 3 + FROM_JAVA


async def read_row(broker: Broker, pipes: PipeFile, pipe: str) -> Row:
    """The sum of the pipe's loss table, from all reports."""
    table, offset = Table(read_flow(pipes)), 0
    offset = (await broker.reader.describe(TELEMETRY))[0].start
    while (batch := await broker.reader.read(TELEMETRY, 0, offset, max_records=500)) is not None:
        for record in batch.records:
            table.apply(decode_report(record.value), int(time.time() * 1000))
        offset = batch.offsets[-1] + 1
    rows = [table.row(pipe, minute, int(time.time() * 1000)) for minute in table.minutes(pipe)]
    assert rows
    total = rows[0]
    for row in rows[1:]:
        total = total + row
    return total


async def _refuse_loop(url: str, file: dict[str, Any], pipe: str, topic: str) -> None:
    """A pipe that writes to the topic that it reads, by another name of its cluster, would send its events round for ever."""
    loop = {"sources": ["invoices"], "destinations": [{"name": "copy", "topic": {"name": topic, "on": "second"}}]}
    pipes = PipeFile.model_validate({**file, "pipes": {pipe: loop}})
    async with open_fleet_broker(url, pipes) as broker:
        with pytest.raises(
            UnsafeTopic, match=rf"topic {topic}: on: it is the topic of stream invoices, and second and default"
        ):
            await ensure_topics(broker.admin, pipes)


async def test_a_topic_of_others_is_delivered_and_accounted_for(
    kafka_cluster: KafkaCluster, database: Postgres, tmp_path: Path
) -> None:
    """Broken: nobody's existing topics reach a webhook, or their events are lost, doubled or counted wrong."""
    bootstrap = kafka_cluster.bootstrap
    topic, target = (
        await make_topic(bootstrap, "Billing.invoices", partitions=2),
        await make_topic(bootstrap, "erp.copy"),
    )
    pipe, refuses = unique_name("bill"), True
    url = f"kafka://{bootstrap}?prefix={unique_name('fleet')[:20]}."

    async def answer(received: Received) -> web.Response:
        if "refused-1" in received.ids and refuses:
            return web.json_response({"failed": [{"id": "refused-1", "retry": False}]})
        return web.Response(status=204)

    count = await produce(bootstrap, topic, database)
    async with open_receiver(answer) as receiver:
        expel = ForeignExpel(tmp_path, None, url, [], pipe=pipe)  # type: ignore[arg-type]
        copy = {"name": "copy", "topic": {"name": target, "on": "second"}}
        expel.pipe_file = {
            "brokers": {"second": f"kafka://{bootstrap}?prefix=other."},
            "streams": {"invoices": {"topic": topic, "id": {"header": "invoice-id"}}},
            "pipes": {pipe: {"sources": ["invoices"], "destinations": [hook("hook", receiver.url), copy]}},
        }
        pipes = await asyncio.to_thread(load_pipes, expel.write_pipes())
        async with open_fleet_broker(url, pipes) as broker, kill_at_end(expel):
            await ensure_topics(broker.admin, pipes)
            await _refuse_loop(url, expel.pipe_file, pipe, topic)
            for change in (
                broker.admin.delete_topic("invoices"),
                broker.admin.add_partitions("invoices", 9),
                broker.appender.append("invoices", 0, [], timeout=5),
                broker.admin.delete_topic(target_name(target, "second")),
            ):
                with pytest.raises(BrokerError, match="topic of others"):
                    await change
            await expel.start()
            good = count - 4  # without the tombstone, the two bad records and the refused one
            async with asyncio.timeout(DEADLINE):
                while len(receiver.accepted) < good or await _lag(broker, pipe):
                    await asyncio.sleep(0.1)
            assert {"connect-7", "connect-bare", "committed"} <= set(receiver.accepted)
            assert "rolled-back" not in receiver.accepted
            assert sum(one.startswith(f"{topic}-") for one in receiver.accepted) == 25 + 5 * len(CODECS) + 3
            await expel.stop()

            letters = await _letters(broker, pipe)
            assert {
                (one.destination, one.reason, one.event_id, one.detail) for one in letters if one.destination == "hook"
            } == {
                ("hook", "bad_record", "plain-text", "the value is not JSON in UTF-8"),
                ("hook", "bad_record", _id_of(letters, "the id is not"), "the id is not text in UTF-8"),
                ("hook", ITEM_FAILED, "refused-1", next(one.detail for one in letters if one.event_id == "refused-1")),
            }
            row = await read_row(broker, pipes, pipe)
            hooked = next(step for step in row.steps if step.destination == "hook")
            assert (row.accepted, row.missing) == (count, 0)
            assert {outcome: n for outcome, n in hooked.outcomes.items() if n} == {
                "delivered": good,
                "dead": 3,
                "filtered": 1,
            }

            refuses = False
            targets = RedriveTargets(pipes, to_stream=True)
            async with Producer(broker.appender) as producer:
                where = Filter(pipe=pipe, reason=ITEM_FAILED)
                redrive = Redrive(targets, producer, Auditor(producer, "me@here", where.as_json()), 1000)
                await redrive.run((await DeadLetterSearch.open(broker, where)).pages())
            assert redrive.so_far.done == 1
            await expel.start()
            async with asyncio.timeout(DEADLINE):
                while "refused-1" not in receiver.accepted:
                    await asyncio.sleep(0.1)
            await expel.stop()
            row = await read_row(broker, pipes, pipe)
            assert (row.accepted, row.missing, row.waiting) == (count, 0, 0)

            scope = make_scope(pipes, "connect-7", int(time.time() * 1000))
            story = await find_story(broker, pipes, "connect-7", scope, Limits(60, 100_000, 1 << 28))
            (event,) = story.events
            assert event.stream == "invoices"
            assert [lane.state for one in event.pipes for lane in one.destinations] == ["delivered", "delivered"]
            await _check_copies(bootstrap, target, pipe)


def _id_of(letters: list[DeadLetter], detail: str) -> str | None:
    return next(one.event_id for one in letters if one.detail.startswith(detail))


async def _lag(broker: Broker, pipe: str) -> int:
    groups = [await broker.admin.group_lag(f"{pipe}.{name}", "invoices") for name in ("hook", "copy")]
    return sum(lag.records for group in groups for lag in group.values())


async def _letters(broker: Broker, pipe: str) -> list[DeadLetter]:
    search = await DeadLetterSearch.open(broker, Filter(pipe=pipe))
    return [letter async for page in search.pages() for letter in page]


async def _check_copies(bootstrap: str, target: str, pipe: str) -> None:
    """What other consumers see in the topic that we wrote: CloudEvents, and nothing of ours."""
    consumer = AIOKafkaConsumer(target, bootstrap_servers=bootstrap, auto_offset_reset="earliest")
    wanted = {"connect", "c", "u", "d"}
    async with consumer, asyncio.timeout(DEADLINE):
        async for found in consumer:
            headers = dict(found.headers)
            if headers["ce_id"] == b"plain-text":
                continue
            value = json.loads(found.value)
            if headers["ce_id"] == b"connect-7":
                assert value == CONNECT
                wanted.discard("connect")
            if value.get("source", {}).get("connector") == "postgresql":
                row = value["after"] or value["before"]
                assert (found.key, row["id"]) == (b'{"id":9}', 9)
                wanted.discard(value["op"])
            assert (headers["ce_specversion"], headers["content-type"]) == (b"1.0", b"application/json")
            assert (headers["ce_source"], headers["ce_type"]) == (f"penstock/{pipe}".encode(), b"penstock.invoices")
            assert not [name for name in headers if name.startswith("penstock_")]
            if not wanted:
                return


class _Rebalances(ConsumerRebalanceListener):  # type: ignore[misc]
    """Counts how often a group of others was divided anew."""

    count = 0

    async def on_partitions_revoked(self, revoked: object) -> None:
        return

    async def on_partitions_assigned(self, assigned: object) -> None:
        self.count += 1


async def _owned(bootstrap: str, topic: str, count: int) -> tuple[object, ...]:
    """What its owner sees of a topic: settings, `count` records or more, and topics with its name."""
    async with (
        open_admin(bootstrap) as admin,
        AIOKafkaConsumer(bootstrap_servers=bootstrap) as reader,
        asyncio.timeout(DEADLINE),
    ):
        (answer,) = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
        settings = sorted((name, value) for name, value, *_ in answer.resources[0][4])
        topics = sorted(name for name in await admin.list_topics() if topic in name)
        places = [KafkaPartition(topic, one["partition"]) for one in await describe_partitions(bootstrap, topic)]
        reader.assign(places)
        await reader.seek_to_beginning(*places)
        while (there := sum((await reader.end_offsets(places)).values())) < count:
            await asyncio.sleep(0.1)  # the newest ones are not on all replicas yet
        records: list[tuple[object, ...]] = []
        while len(records) < there:
            one = await reader.getone()
            records.append((one.partition, one.offset, one.timestamp, one.key, one.value, one.headers))
    return (topics, settings, sorted(records, key=lambda record: record[:2]))


async def test_retries_and_pauses_beside_another_group(kafka_cluster: KafkaCluster, tmp_path: Path) -> None:
    """Broken: an event of others that waits or is parked is lost, or our reading disturbs the topic or the group of its owner."""
    bootstrap = kafka_cluster.bootstrap
    topic = await make_topic(bootstrap, "Billing.orders", partitions=2, configs={"retention.ms": "3600000"})
    pipe, team, rebalances = unique_name("bill"), unique_name("billing-team"), _Rebalances()
    url = f"kafka://{bootstrap}?prefix={unique_name('fleet')[:20]}."
    is_away = True

    async def answer(received: Received) -> web.Response:
        if is_away and "late" in received.ids:
            return web.json_response({"failed": [{"id": "late", "retry": True}]})
        return web.Response(status=204)

    async def write(*names: str) -> None:
        async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
            for name in names:
                await producer.send_and_wait(topic, b'{"id": "%s"}' % name.encode(), name.encode())

    await write("late", "early")
    owner = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=team, enable_auto_commit=False)
    owner.subscribe([topic], listener=rebalances)
    async with (
        open_receiver(answer) as receiver,
        owner,
        kill_retrier_at_end(RetrierProcess(tmp_path, url)) as retrier,
    ):
        async with asyncio.timeout(DEADLINE):
            while len(owner.assignment()) < 2:
                await asyncio.sleep(0.1)
        places = {place: place.partition + 1 for place in owner.assignment()}
        await owner.commit({place: OffsetAndMetadata(offset, "theirs") for place, offset in places.items()})
        expel = ForeignExpel(tmp_path, None, url, [], stream="orders", pipe=pipe)  # type: ignore[arg-type]
        destination = hook("hook", receiver.url, schedule=["1s"] * 30, retry={"attempts": 1})
        expel.pipe_file = {
            "streams": {"orders": {"topic": topic, "id": "id"}},
            "pipes": {pipe: {"sources": ["orders"], "destinations": [destination]}},
        }
        pipes = await asyncio.to_thread(load_pipes, expel.write_pipes())
        before = await _owned(bootstrap, topic, 2)
        async with open_broker(url, existing_topics(pipes)) as broker, kill_at_end(expel):
            expel.broker = broker
            await ensure_topics(broker.admin, pipes)
            await retrier.start()
            await expel.start()
            await retrier.wait_metric(1, "penstock_retrier_events_moved_total")
            assert receiver.accepted == ["early"]
            is_away = False
            await receiver.wait_for_ids(["late"])
            await decide(expel, "paused")
            await expel.wait_metric(1, "penstock_expel_paused", destination="hook")
            assert await _owned(bootstrap, topic, 2) == before
            await write("parked-1", "parked-2")
            written = await _owned(bootstrap, topic, 4)
            await wait_parked(expel, 2)
            await expel.wait_no_lag("hook")
            await decide(expel, "resumed")
            await receiver.wait_for_ids(["parked-1", "parked-2"])
            await wait_replayed(expel)
            await expel.stop()
            row = await read_row(broker, pipes, pipe)
            assert (row.accepted, row.missing, row.waiting) == (4, 0, 0)
            assert sorted(receiver.accepted) == ["early", "late", "parked-1", "parked-2"]
        assert await _owned(bootstrap, topic, 4) == written
        assert {place: await owner.committed(place) for place in places} == places
        assert rebalances.count == 1


async def test_a_topic_of_others_that_is_not_there(kafka_cluster: KafkaCluster, tmp_path: Path) -> None:
    """Broken: Penstock creates a topic under a mistyped name, and waits for events there for ever."""
    url = f"kafka://{kafka_cluster.bootstrap}?prefix={unique_name('fleet')[:20]}."
    pipes = PipeFile.model_validate(
        {
            "streams": {"s": {"topic": "nobody.made.this"}},
            "pipes": {"p": {"sources": ["s"], "destinations": [{"name": "d", "topic": {"name": "nor.this"}}]}},
        }
    )
    async with open_broker(url, existing_topics(pipes)) as broker:
        with pytest.raises(NoSuchTopics, match=r"nobody\.made\.this, nor\.this"):
            await ensure_topics(broker.admin, pipes)
        assert await broker.admin.topics() == {}
        with pytest.raises(UnknownTopic):
            await broker.reader.describe("s")
        with pytest.raises(UnknownTopic):
            await broker.reader.describe(dead_letter_topic("p"))
    with pytest.raises(BadBrokerUrl, match="they are on Kafka only"):
        open_broker(f"log://{tmp_path}", existing_topics(pipes))


async def test_a_topic_of_others_that_its_owner_alters_deletes_and_makes_anew(kafka_cluster: KafkaCluster) -> None:
    """Broken: when its owner changes the topic while we read, events are skipped, or those of the new topic count as read."""
    bootstrap = kafka_cluster.bootstrap
    topic, group = await make_topic(bootstrap, "Owned.orders"), unique_name("reader")
    pipes = PipeFile.model_validate({"streams": {"orders": {"topic": topic}}})
    ours = f"kafka://{bootstrap}?prefix={unique_name('fleet')[:20]}."
    found: dict[str, list[str]] = {}

    async def write(values: range, partition: int = 0) -> None:
        async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
            for value in values:
                await producer.send_and_wait(topic, b"%d" % value, partition=partition)

    async def read_until(broker: Broker, count: int) -> None:
        """As a lane reads: it joins again after an error."""

        async with asyncio.timeout(DEADLINE):
            while sum(map(len, found.values())) < count:
                with suppress(BrokerError):
                    async with broker.consumer(group, ["orders"], start="earliest", on_revoke=ignore_revoke) as member:
                        while sum(map(len, found.values())) < count:
                            for batch in await member.poll(max_records=100, max_wait=0.3):
                                for record in batch.records:
                                    run = Origin.unpack(record.header(ORIGIN) or b"").incarnation
                                    found.setdefault(run, []).append((record.value or b"").decode())
                                await member.commit({batch.source: batch.offsets[-1]})

    async with open_broker(ours, existing_topics(pipes)) as broker, open_admin(bootstrap) as owner:
        await broker.admin.create_own_topics()
        await write(range(3))
        await read_until(broker, 3)
        await owner.create_partitions({topic: NewPartitions(2)})
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, {"message.timestamp.type": "LogAppendTime"})
        await owner.alter_configs([resource])
        await describe_partitions(bootstrap, topic)
        await write(range(3, 5), partition=1)
        await read_until(broker, 5)
        assert [sorted(values) for values in found.values()] == [["0", "1", "2", "3", "4"]]
        await owner.delete_topics([topic])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await read_until(broker, 6)  # nothing to read, and no error that ends the member
        async with asyncio.timeout(DEADLINE):
            while (await owner.create_topics([NewTopic(topic, 1, 1)])).topic_errors[0][1]:
                await asyncio.sleep(0.1)
        await write(range(10, 12))
        await read_until(broker, 7)
        assert [sorted(values) for values in found.values()] == [["0", "1", "2", "3", "4"], ["10", "11"]]
