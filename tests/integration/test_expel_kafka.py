"""Expel as a process over a real Kafka of three brokers."""

import asyncio
import itertools
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from aiohttp import web

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import TopicExists
from services.core.broker.kafka import KafkaBroker
from services.core.jvm.kafka import KafkaCluster
from services.core.ledger.report import TELEMETRY
from services.core.pipe_file.topic_names import CONTROL, dead_letter_topic, parked_topic, retry_topic
from tests.integration.expel_process import (
    Expel,
    decide,
    hook,
    ids,
    kill_at_end,
    make_record,
    wait_parked,
    wait_replayed,
)
from tests.support.kafka import unique_name
from tests.unit.expel.receiver import DEADLINE, Received, open_receiver

pytestmark = pytest.mark.kafka


async def make_topics(broker: KafkaBroker, stream: str, pipe: str) -> None:
    """Those of one pipe, without a retention: the events' times are old. The control topic is the whole cluster's."""
    for topic in (stream, dead_letter_topic(pipe)):
        await broker.admin.create_topic(TopicSpec(topic, 4))
    for topic in (retry_topic(pipe), parked_topic(pipe), CONTROL, TELEMETRY):
        with suppress(TopicExists):
            await broker.admin.create_topic(TopicSpec(topic, 1))


async def test_delivery_and_rebalance_on_kafka(kafka_cluster: KafkaCluster, tmp_path: Path) -> None:
    """Broken: on Kafka, events are lost when instances come and go, dead letters are missing, or backlog is never zero."""
    calls = itertools.count()

    async def answer(received: Received) -> web.Response:
        await asyncio.sleep(0.01)
        if "wrong" in received.ids:
            failed = [{"id": "wrong", "retry": False}]
            return web.json_response({"failed": failed})
        return web.Response(status=503 if next(calls) % 10 == 0 else 204)

    url = f"kafka://{kafka_cluster.bootstrap}"
    stream, pipe = unique_name("flights"), unique_name("late")
    async with KafkaBroker.open(kafka_cluster.bootstrap) as broker, open_receiver(answer) as receiver:
        retry = {"attempts": 20, "base": "10ms", "max_wait": "100ms"}
        destination = hook("hook", receiver.url, retry=retry, batch={"max_events": 20})
        expel = Expel(tmp_path, broker, url, [destination], stream=stream, pipe=pipe)
        await make_topics(broker, stream, pipe)
        async with kill_at_end(expel), kill_at_end(expel.second()) as second:
            await expel.start()
            await expel.send(ids(3000))
            await expel.send_records([make_record("wrong")])
            await second.start()
            sent = 3000
            async with asyncio.timeout(DEADLINE):
                while await second.metric("penstock_expel_events_delivered_total") < 50:
                    await expel.send(ids(100, start=sent))
                    sent += 100
            assert await expel.stop() == 0
            await expel.send(ids(1000, start=sent))
            await receiver.wait_for_ids(ids(sent + 1000))
            await second.wait_no_lag("hook")
            (letter,) = await second.read_all(dead_letter_topic(pipe), 1)
            assert letter.header("ce_id") == b"wrong"
            assert await second.stop() == 0


async def test_a_pause_on_kafka(kafka_cluster: KafkaCluster, tmp_path: Path) -> None:
    """Broken: on Kafka, a crash ends a pause, or what was parked is lost."""
    url = f"kafka://{kafka_cluster.bootstrap}"
    stream, pipe = unique_name("flights"), unique_name("late")
    async with KafkaBroker.open(kafka_cluster.bootstrap) as broker, open_receiver() as receiver:
        expel = Expel(tmp_path, broker, url, [hook("hook", receiver.url)], stream=stream, pipe=pipe)
        await make_topics(broker, stream, pipe)
        async with kill_at_end(expel):
            await expel.start()
            await decide(expel, "paused")
            await expel.wait_metric(1, "penstock_expel_paused", destination="hook")
            await expel.send(ids(100))
            await wait_parked(expel, 100)
            await expel.wait_no_lag("hook")
            await expel.stop(signal.SIGKILL)
            await expel.start()
            await expel.send(ids(50, start=100))
            await wait_parked(expel, 150)
            assert not receiver.requests
            await decide(expel, "resumed")
            await receiver.wait_for_ids(ids(150))
            await wait_replayed(expel)
            assert await expel.stop() == 0
