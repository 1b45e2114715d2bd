"""The disasters of docs/backup.md, with the commands of that page: nothing is lost but what the page says, and that is counted.

The machine or its disk is lost: the page itself runs as a test (`integration/test_docs.py`).
"""

import asyncio
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import NewTopic
from aiokafka.structs import ConsumerRecord

from services.core.aws_emulator import CREDENTIALS, AwsEmulator
from services.core.aws_emulator import REGION as EMULATED
from services.core.jvm.kafka import KafkaCluster
from tests.faults.fleet import wait_until
from tests.faults.shop import Shop, command_of, now, open_receiver, open_shop
from tests.support.kafka import delete_group, open_admin, unique_name

APPLY = "penstock apply -f pipes.yaml --allow-networks 127.0.0.0/8 --broker"
REGION, NAMED = "The region is lost", "20261123T034500.123Z"
REBUILT, DEPLOY, DELETE = "The Kafka cluster is lost, or built again", "A wrong deploy", "A wrong delete"


async def test_a_cluster_that_is_built_again(kafka_cluster: KafkaCluster, tmp_path: Path) -> None:
    """Broken: after the loss of a cluster a destination passes over the events that the mirror has, gets all of them again, or
    nobody can bring the fleet back with the page."""
    async with _open_on_kafka(kafka_cluster, tmp_path) as (shop, prefix):
        await shop.wait_came(delivered := await shop.send(30))
        await shop.stop("expel")
        failed = now()
        waiting = await shop.send(30)
        await shop.stop("ingest")
        records = await _read(kafka_cluster, f"{prefix}orders", 60)
        mirrored = [one for one in records if b"o-59" not in one.value]  # the mirror was a little behind
        await _lose_cluster(kafka_cluster, prefix)

        async with open_admin(
            kafka_cluster.bootstrap
        ) as admin:  # as MirrorMaker makes it: with the times of the source
            await admin.create_topics([NewTopic(f"{prefix}orders", 2, 3)])
        await _write(kafka_cluster, f"{prefix}orders", mirrored)
        await shop.run(command_of(REBUILT, "penstock apply", url=shop.url) + " --allow-networks 127.0.0.0/8")
        said = await shop.run(command_of(REBUILT, "penstock group skip", url=shop.url, time=failed) + " --yes")
        assert "30" in said
        await shop.start()
        fresh = await shop.send(5)
        await shop.wait_came({*waiting, *fresh} - {59})
        assert shop.crm.came == dict.fromkeys({*delivered, *waiting, *fresh} - {59}, 1)


async def test_what_kafka_forgot(kafka_cluster: KafkaCluster, tmp_path: Path) -> None:
    """Broken: who deletes a group or a topic of Kafka loses more than the page says, or the page does not bring it back."""
    async with _open_on_kafka(kafka_cluster, tmp_path) as (shop, prefix):
        await shop.wait_came(delivered := await shop.send(20))
        await shop.stop("expel")
        deleted_at = now()
        waiting = await shop.send(20)
        await delete_group(kafka_cluster.bootstrap, f"{prefix}shop.crm")
        await shop.start("expel")
        expel = shop.fleet.services["expel"]
        stopped = {"orders": 2, "shop.retry": 1, "shop.parked": 1}
        await wait_until(lambda: expel.log.read_text().count('"event":"records_missing"') >= sum(stopped.values()))
        assert shop.crm.came == dict.fromkeys(delivered, 1)
        await shop.stop("expel")
        for begin in ("penstock group skip shop", "penstock group reset shop"):
            await shop.run(command_of(DELETE, begin, url=shop.url, time=deleted_at) + " --yes")
        await shop.start("expel")
        await shop.wait_came(waiting)
        expel = shop.fleet.services["expel"]
        await wait_until(lambda: expel.metric("penstock_expel_lane_up", pipe="shop"))  # no partition waits for a person
        assert shop.crm.came == dict.fromkeys({*delivered, *waiting}, 1)

        await _delete_topics(kafka_cluster, [f"{prefix}orders"])
        await shop.run(command_of(DELETE, "penstock apply -f", url=shop.url) + " --allow-networks 127.0.0.0/8")
        await wait_until(lambda: shop.fleet.services["ingest"].is_ready())
        await shop.wait_came(await shop.send(20))


@asynccontextmanager
async def _open_on_kafka(cluster: KafkaCluster, folder: Path) -> AsyncIterator[tuple[Shop, str]]:
    """A fleet that runs, and the beginning of all its names on the cluster."""
    prefix = f"{unique_name('lost')}."
    async with open_shop(folder, f"kafka://{cluster.bootstrap}?prefix={prefix}") as shop:
        await shop.run(f"{APPLY} '{shop.url}'")
        await shop.start()
        yield shop, prefix


async def _lose_cluster(cluster: KafkaCluster, prefix: str) -> None:
    """Everything of the fleet on it: topics, groups and what is known of them."""
    async with open_admin(cluster.bootstrap) as admin:
        topics = [name for name in await admin.list_topics() if name.startswith(prefix)]
        groups = [name for name, *_ in await admin.list_consumer_groups() if name.startswith(prefix)]
    assert f"{prefix}orders" in topics
    assert f"{prefix}shop.crm" in groups
    for group in groups:
        await delete_group(cluster.bootstrap, group)
    await _delete_topics(cluster, topics)


async def _delete_topics(cluster: KafkaCluster, topics: list[str]) -> None:
    async with open_admin(cluster.bootstrap) as admin:
        await admin.delete_topics(topics)

        async def are_gone() -> bool:
            return not set(topics) & set(await admin.list_topics())

        await wait_until(are_gone)


async def _read(cluster: KafkaCluster, topic: str, count: int) -> list[ConsumerRecord]:
    """As a mirror does."""
    consumer = AIOKafkaConsumer(topic, bootstrap_servers=cluster.bootstrap, auto_offset_reset="earliest")
    await consumer.start()
    try:
        found: list[ConsumerRecord] = []
        while len(found) < count:
            for records in (await consumer.getmany(timeout_ms=500)).values():
                found += records
        return found
    finally:
        await consumer.stop()


async def _write(cluster: KafkaCluster, topic: str, records: Sequence[ConsumerRecord]) -> None:
    """As a mirror does: key, headers, time and partition stay."""
    producer = AIOKafkaProducer(bootstrap_servers=cluster.bootstrap)
    await producer.start()
    try:
        for one in records:
            await producer.send_and_wait(
                topic, one.value, one.key, one.partition, one.timestamp, headers=list(one.headers)
            )
    finally:
        await producer.stop()


async def test_a_region_that_is_lost(tmp_path: Path) -> None:
    """Broken: a backup that was copied to another region cannot be used there, or brings back less than it showed."""
    here, there = tmp_path / "here", tmp_path / "there"
    async with open_shop(here, f"log://{here / 'data' / 'log'}") as shop:
        await shop.run(f"{APPLY} '{shop.url}'")
        await shop.start()
        delivered = await shop.send(20)
        await shop.wait_came(delivered)
        await shop.stop("expel")
        waiting = await shop.send(20)
        await shop.run("penstock backup create backups")
        later = await shop.send(10)
        await shop.fleet.services["ingest"].kill()
        await asyncio.to_thread(shutil.copytree, here / "backups", there / "backups")
        await asyncio.to_thread(shutil.rmtree, here)

        shop.folder, shop.url, shop.listen = there, f"log://{there / 'data' / 'log'}", ""
        shop.write_pipes()
        (made,) = [one for one in await asyncio.to_thread(os.listdir, there / "backups") if one.startswith("2")]
        for begin in ("penstock backup verify", "penstock backup restore", "penstock log verify"):
            await shop.run(command_of(REGION, begin).replace(NAMED, made))
        await shop.start()
        fresh = await shop.send(5)
        await shop.wait_came({*waiting, *fresh})
        assert shop.crm.came.keys() == {*delivered, *waiting, *fresh}
        assert set(later) & shop.crm.came.keys() == set()
        assert all(shop.crm.came[number] == 1 for number in (*waiting, *fresh))


async def test_another_region_on_kinesis(
    kinesis_emulator: AwsEmulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: in the other region the fleet looks for what the lost one had, its tables or positions, and does not start."""
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    async with open_shop(tmp_path, f"{kinesis_emulator.url}&prefix={unique_name('shop')}.") as shop:
        await shop.run(f"{APPLY} '{shop.url}'")
        await shop.start()
        delivered = await shop.send(10)
        await shop.wait_came(delivered)
        await shop.stop("expel")
        lost = await shop.send(10)
        await shop.fleet.services["ingest"].kill()

        shop.url = shop.url.replace(EMULATED, "eu-central-1")
        shop.listen = ""
        await shop.run(f"{APPLY} '{shop.url}'")
        await shop.start()
        fresh = await shop.send(10)
        await shop.wait_came(fresh)
        assert shop.crm.came.keys() == {*delivered, *fresh}
        assert not shop.crm.came.keys() & set(lost), "nobody has them any more, as the page says"


async def test_a_wrong_deploy(tmp_path: Path) -> None:
    """Broken: there is no way back from a deploy that starts nothing, or events that a wrong receiver took are gone."""
    async with open_shop(tmp_path, f"log://{tmp_path / 'data' / 'log'}") as shop, open_receiver() as other:
        await shop.run(f"{APPLY} '{shop.url}'")
        await shop.start()
        before = await shop.send(10)
        await shop.wait_came(before)
        await shop.stop("expel")
        deployed = now()
        shop.write_pipes(retry={"attempts": "many"})
        assert "attempts" in await shop.run(f"penstock check --broker '{shop.url}'", status=2)
        await shop.fleet.services["expel"].start()
        assert await shop.fleet.services["expel"].wait_end() == 2
        waiting = await shop.send(10)
        shop.write_pipes(other.url)
        await shop.start("expel")
        taken = await shop.send(10)
        await wait_until(lambda: {*waiting, *taken} <= other.came.keys())
        await shop.stop("expel")

        shop.write_pipes()
        await shop.run(command_of(DEPLOY, "penstock group reset", time=deployed) + f" --broker '{shop.url}' --yes")
        await shop.start("expel")
        await shop.wait_came({*waiting, *taken})
        assert shop.crm.came == dict.fromkeys({*before, *waiting, *taken}, 1)


async def test_a_wrong_delete_in_the_data_folder(tmp_path: Path) -> None:
    """Broken: a row or a file of the log that somebody deleted is passed over in silence, or the fleet stays down."""
    log = tmp_path / "data" / "log"
    async with open_shop(tmp_path, f"log://{log}") as shop:
        await shop.run(f"{APPLY} '{shop.url}'")
        await shop.start()
        first = await shop.send(10)
        await shop.wait_came(first)
        await shop.stop()
        await asyncio.to_thread(_delete_row, log / "groups.db")
        await shop.start()
        await wait_until(lambda: shop.crm.came == dict.fromkeys(first, 2))  # the page: at the earliest record
        await shop.stop()

        for path in await asyncio.to_thread(lambda: list((log / "topics").glob("orders.db*"))):
            await asyncio.to_thread(path.unlink)
        assert "orders" in await shop.run(command_of(DELETE, "penstock log verify"), status=1)
        await shop.run(command_of(DELETE, "penstock log repair") + " --yes")
        await shop.run(f"{APPLY} '{shop.url}'")
        await shop.start()
        await shop.wait_came(await shop.send(10))
        assert all(shop.crm.came[number] == 2 for number in first)


def _delete_row(path: Path) -> None:
    with closing(sqlite3.connect(path)) as file, file:
        assert file.execute("DELETE FROM offsets WHERE grp = 'shop.crm' AND topic = 'orders'").rowcount > 0
