"""Dead letters on a real Kafka: found, redriven and on record as on the log."""

import time

import pytest

from services.core.broker.connect import open_broker
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.jvm.kafka import KafkaCluster
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import dead_letter_topic, retry_topic
from services.core.provision import ensure_topics
from services.core.undelivered.dead_letter import make_dead_letter
from services.core.undelivered.retry_state import unwrap
from services.fleet.dead.audit import Auditor, read_audit
from services.fleet.dead.found import DeadLetterSearch, Filter
from services.fleet.dead.redrive import Redrive, RedriveTargets
from tests.contract.traffic import read_all, records_of
from tests.support.kafka import unique_name

pytestmark = pytest.mark.kafka

COUNT = 250


async def test_redriven_once_and_on_record(kafka_cluster: KafkaCluster) -> None:
    """If it fails, operators on Kafka see other letters than there are, or send some twice or never."""
    pipe = unique_name("late")
    now = time.time_ns() // 1_000_000
    long_ago = now - 2 * 365 * 86_400_000
    destination = {"name": "billing", "webhook": {"url": "https://example.org/hook"}}
    pipes = PipeFile.model_validate(
        {"streams": {pipe: {}}, "pipes": {pipe: {"sources": [pipe], "destinations": [destination]}}}
    )
    originals = [Record(b"k", b'{"n":%d}' % n, long_ago + n, (("ce_id", b"e%d" % n),)) for n in range(COUNT)]
    letters = [
        make_dead_letter(
            original,
            reason="http_404",
            detail="no",
            node="expel",
            pipe=pipe,
            destination="billing",
            first_failure=now,
            source=TopicPartition(pipe, 0),
            offset=n,
            now_ms=now,
        )
        for n, original in enumerate(originals)
    ]
    async with open_broker(f"kafka://{kafka_cluster.bootstrap}") as broker:
        await ensure_topics(broker.admin, pipes)
        where = Filter(pipe=pipe)
        async with Producer(broker.appender) as producer:
            (await producer.send_to(dead_letter_topic(pipe), {0: letters})).raise_first()
            found = await DeadLetterSearch.open(broker, where)
            assert await found.count() == COUNT
            aim = RedriveTargets(pipes, to_stream=False)
            work = Redrive(aim, producer, Auditor(producer, "me@here", where.as_json()), 10_000)
            await work.run(found.pages())
        assert (work.so_far.done, work.so_far.refused) == (COUNT, {})
        written = records_of(await read_all(broker, retry_topic(pipe), unique_name("g")))
        assert [unwrap(record)[0] for record in written] == originals
        assert await (await DeadLetterSearch.open(broker, where)).count() == 0
        entries = [entry async for entry in read_audit(broker.reader) if entry.topic == dead_letter_topic(pipe)]
        assert sum(entry.count for entry in entries) == COUNT
