"""Topics that others made: whose settings lose acknowledged events, or let none be acknowledged, is said at the start."""

import asyncio
import sys
from pathlib import Path

import pytest

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import UnsafeTopic
from services.core.broker.kafka import KafkaBroker, Timing
from services.core.control.key_marks import read_key_marks
from services.core.jvm.kafka import KafkaCluster
from services.core.pipe_file.pipes import PipeFile
from services.core.provision import ensure_topics
from services.fleet.pipes.topics import provision
from services.fleet.problem import CommandFailed
from tests.contract.traffic import DEADLINE
from tests.support.kafka import make_topic, unique_name

pytestmark = pytest.mark.kafka

_TIMING = Timing(session=2.0, heartbeat=0.3, drain=10.0, request=4.0, metadata=1.0)
_UNSAFE = [
    (1, {"min.insync.replicas": "2"}, "replication.factor"),
    (3, {"min.insync.replicas": "1"}, "min.insync.replicas"),
    (1, {"min.insync.replicas": "1"}, "min.insync.replicas"),
    (3, {"unclean.leader.election.enable": "true"}, "unclean.leader.election.enable"),
]


async def _make(cluster: KafkaCluster, replicas: int, settings: dict[str, str]) -> str:
    return await make_topic(cluster.bootstrap, "foreign", replicas=replicas, configs=settings)


@pytest.mark.parametrize(("replicas", "settings", "key"), _UNSAFE, ids=["RF<ISR", "ISR=1", "RF=1", "unclean"])
async def test_unsafe_topics_are_named(
    kafka_cluster: KafkaCluster, replicas: int, settings: dict[str, str], key: str
) -> None:
    """If it fails, events are acknowledged that one broken disk loses, or a topic is used that can take none."""
    topic = await _make(kafka_cluster, replicas, settings)
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        with pytest.raises(UnsafeTopic, match="Try:") as unsafe:
            await broker.admin.check_durability([topic, unique_name("missing")])
    assert [problem[:2] for problem in unsafe.value.problems] == [(topic, key)]


async def test_safe_topics_pass(kafka_cluster: KafkaCluster) -> None:
    """If it fails, good topics of others are refused, or those that we make ourselves."""
    foreign = await _make(kafka_cluster, 2, {"min.insync.replicas": "2"})
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        ours = unique_name("ours")
        await broker.admin.create_topic(TopicSpec(ours))
        await broker.admin.check_durability([foreign, ours])


async def test_a_single_broker_is_taken_as_it_is(tmp_path: Path) -> None:
    """If it fails, `penstock up --broker kafka` and every demo on one broker refuse to start, or never refuse anything; or they
    refuse to start after a growth, or an empty topic that somebody else created never counts as one without keys."""
    cluster = await asyncio.to_thread(KafkaCluster, tmp_path / "kafka", brokers=1)
    pipes = PipeFile.model_validate({"streams": {"one": {"partitions": 1}, "two": {"partitions": 1}}, "pipes": {}})
    try:
        await asyncio.to_thread(cluster.start)
        async with KafkaBroker.open(cluster.bootstrap, timing=_TIMING) as broker:
            await broker.admin.create_topic(TopicSpec("one", partitions=1))
            assert (await ensure_topics(broker.admin, pipes)).kept == ("one",)
            await broker.admin.add_partitions("one", 3)
            done = await provision(f"kafka://{cluster.bootstrap}", pipes)
            assert (done.created, done.grown) == ((), ())
            assert (await broker.admin.topics())["one"] == 3
            marks = await read_key_marks(broker.reader)
            assert {name: mark.state for name, mark in marks.items()} == {"one": "none", "two": "none"}
    finally:
        await asyncio.to_thread(cluster.stop, grace_s=0)


async def test_up_and_apply_refuse_before_they_change_anything(kafka_cluster: KafkaCluster) -> None:
    """If it fails, `penstock up` starts on a topic that loses what it acknowledges, or leaves half of its topics behind."""
    topic, other = await _make(kafka_cluster, 3, {"min.insync.replicas": "1"}), unique_name("other")
    pipes = PipeFile.model_validate(
        {"streams": {topic: {"partitions": 1}, other: {"partitions": 1}}, "pipes": {}},
    )
    with pytest.raises(CommandFailed, match=rf"{topic}: min\.insync\.replicas: .*Try:") as failed:
        await provision(f"kafka://{kafka_cluster.bootstrap}", pipes)
    assert failed.value.status == 2
    async with KafkaBroker.open(kafka_cluster.bootstrap, timing=_TIMING) as broker:
        assert other not in await broker.admin.topics()


@pytest.mark.parametrize(
    ("service", "role"), [("services.ingest", "stream"), ("services.expel", "stream"), ("services.expel", "copy")]
)
async def test_a_service_alone_refuses_to_start(
    kafka_cluster: KafkaCluster, tmp_path: Path, service: str, role: str
) -> None:
    """If it fails, a service that is started without `penstock up` acknowledges, or copies, to where events are lost."""
    unsafe, good = await _make(kafka_cluster, 3, {"min.insync.replicas": "1"}), unique_name("good")
    stream, copy = (unsafe, good) if role == "stream" else (good, unsafe)
    pipes = tmp_path / "pipes.yaml"
    pipes.write_text(
        f"streams: {{{stream}: {{}}, {copy}: {{}}}}\n"
        f"pipes: {{p: {{sources: [{stream}], destinations: [{{name: d, stream: {copy}}}]}}}}\n"
    )
    flags = ["--broker", f"kafka://{kafka_cluster.bootstrap}", "--pipes", str(pipes), "--management", "127.0.0.1:0"]
    listen = ["--listen", "127.0.0.1:0"] if service == "services.ingest" else []
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", service, *flags, *listen),
        stderr=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(DEADLINE):
            _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 2, said
    assert f"topic {unsafe}: min.insync.replicas:" in said.decode()
    assert "Try:" in said.decode()
