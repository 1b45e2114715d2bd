"""Provisioning: what a pipe file implies exists afterwards, whoever else is at it, and nothing changes silently."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from services.core import provision
from services.core.audit import GROW
from services.core.broker.connect import open_broker
from services.core.broker.contract import Admin, Broker, TopicSpec
from services.core.broker.errors import AccessRefused, BrokerError, Unavailable, UnsafeTopic
from services.core.broker.log import LogBroker
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.broker.several.broker import open_several
from services.core.broker.several.brokers import Places
from services.core.control.key_marks import read_key_marks, write_key_marks
from services.core.ledger.report import SNAPSHOTS, TELEMETRY
from services.core.pipe_file.existing_topics import target_homes
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import AUDIT, CONTROL, DELAYS_S, RETRIER_DEAD, RETRY_IN, delay_topic
from services.core.pipe_file.webhook import SCHEDULE
from services.core.provision import (
    LargerTopic,
    NoSuchTopics,
    Recorder,
    TooFewPartitions,
    ensure_topics,
    find_larger,
    find_others,
    wanted_topics,
)
from services.fleet.dead.audit import read_audit
from tests.contract.traffic import append

PIPES = PipeFile.model_validate(
    {
        "streams": {"a": {"partitions": 2, "retention": "1d"}, "b": {"partitions": 6, "retention": "3d"}},
        "pipes": {
            "plain": {"sources": ["a"], "destinations": [{"name": "d", "stream": "b"}]},
            "joined": {
                "sources": ["a", "b"],
                "transform": {"sql": "SELECT 1"},
                "destinations": [{"name": "d", "webhook": {"url": "https://example.org"}}],
            },
        },
    }
)


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with open_broker(f"log://{tmp_path}/log") as opened:
        yield opened


def test_what_a_pipe_file_implies() -> None:
    """Broken: an output has fewer partitions than its source and becomes the bottleneck, or forgets before its source."""
    specs = {spec.name: (spec.partitions, spec.retention_ms) for spec in wanted_topics(PIPES)}
    day, schedule = 86_400_000, int(sum(SCHEDULE) * 1000)
    assert {name: spec for name, spec in specs.items() if not name.startswith("penstock.")} == {
        "a": (2, day),
        "b": (6, 3 * day),
        "plain.dead": (1, (1 + 30) * day),
        "joined.out": (6, 3 * day),
        "joined.dead": (1, (3 + 30) * day + schedule),
        "joined.retry": (1, 14 * day),
        "joined.parked": (1, None),
    }


def test_the_retriers_topics() -> None:
    """Broken: what waits a day is gone when the retrier comes back after a week, or fleets without retries pay for topics."""
    day = 86_400_000
    found = {spec.name: (spec.partitions, spec.retention_ms) for spec in wanted_topics(PIPES)}
    retriers = {name: spec for name, spec in found.items() if name.startswith("penstock.")}
    delays = {delay_topic(seconds): (1, seconds * 1000 + 14 * day) for seconds in DELAYS_S}
    ours = {AUDIT: (1, None), CONTROL: (1, None), TELEMETRY: (1, day), SNAPSHOTS: (1, 2 * day)}
    assert retriers == {RETRY_IN: (1, 14 * day), RETRIER_DEAD: found["joined.dead"], **ours, **delays}
    unretried: list[dict[str, object]] = [{"schedule": []}, {"order": "key"}]
    for webhook in unretried:
        destination = {"name": "d", "webhook": {"url": "https://example.org", **webhook}}
        data = {"streams": {"a": {}}, "pipes": {"p": {"sources": ["a"], "destinations": [destination]}}}
        names = {spec.name for spec in wanted_topics(PipeFile.model_validate(data))}
        assert {name for name in names if name.startswith("penstock.")} == ours.keys()


async def test_idempotent_and_at_the_same_time(broker: Broker) -> None:
    """Broken: two starts at once fail each other, or a second one fails on what the first made."""
    both = await asyncio.gather(*(ensure_topics(broker.admin, PIPES) for _ in range(2)))
    names = sorted(spec.name for spec in wanted_topics(PIPES))
    assert sorted(topic for done in both for topic in done.created) == names
    again = await ensure_topics(broker.admin, PIPES)
    assert (again.created, again.grown, len(again.kept)) == ((), (), len(names))
    assert await broker.admin.topics() == {spec.name: spec.partitions for spec in wanted_topics(PIPES)}


async def test_partitions_never_change_silently(broker: Broker) -> None:
    """Broken: keys move to other partitions, and their order is lost without anybody having decided it."""
    await ensure_topics(broker.admin, PIPES)
    data = PIPES.model_dump(include={"streams": {"a": {"id"}, "b": {"id"}}})
    wider = PipeFile.model_validate({**data, "streams": {"a": {"partitions": 3}, "b": {"partitions": 6}, "c": {}}})
    with pytest.raises(TooFewPartitions, match="topic a has 2 partitions, the pipe file asks for 3"):
        await ensure_topics(broker.admin, wider)
    assert "c" not in await broker.admin.topics()
    async with Producer(broker.appender) as producer:
        recorder = Recorder(broker, producer, "me@here")
        with pytest.raises(TooFewPartitions, match="keys will map to other partitions"):
            await ensure_topics(broker.admin, wider, recorder=recorder)
        await write_key_marks(producer, ["a"], "none", "me@here")
        with pytest.raises(TooFewPartitions, match="no event of it ever had a key"):
            await ensure_topics(broker.admin, wider, recorder=recorder)
        done = await ensure_topics(broker.admin, wider, grow=True, recorder=recorder)
    assert (done.created, done.grown) == (("c",), ("a",))
    ours = {TELEMETRY, SNAPSHOTS, AUDIT, CONTROL, RETRY_IN, RETRIER_DEAD, *map(delay_topic, DELAYS_S)}
    assert set(done.kept) == {"b", *ours}
    assert (await broker.admin.topics())["a"] == 3
    (entry,) = [entry async for entry in read_audit(broker.reader)]
    assert (entry.action, entry.who, entry.topic, entry.count) == (GROW, "me@here", "a", 1)


async def test_two_may_grow_a_topic_at_once(broker: Broker) -> None:
    """Broken: of two deploys at once, or of a person and the autoscaler, one ends with an error, and the rest is not done."""
    streams = {"a": {"partitions": 2}, "b": {"partitions": 2}}
    await ensure_topics(broker.admin, PipeFile.model_validate({"streams": streams}))
    wider = PipeFile.model_validate({"streams": {name: {"partitions": 3} for name in streams}})

    async def add_first(topic: str, has: int, wanted: int) -> None:
        if topic == "a":
            await broker.admin.add_partitions(topic, wanted + 1)

    recorder = cast("Recorder", AsyncMock(record_growth=add_first))
    done = await ensure_topics(broker.admin, wider, grow=True, recorder=recorder)
    assert done.grown == ("a", "b")
    counts = await broker.admin.topics()
    assert (counts["a"], counts["b"]) == (4, 3)


@pytest.mark.parametrize("grow", [False, True])
async def test_more_partitions_are_never_refused(broker: Broker, grow: bool) -> None:
    """Broken: after the autoscaler has added partitions, the next start and the next deploy fail."""
    await ensure_topics(broker.admin, PIPES)
    for topic in ("a", "joined.out", CONTROL, RETRY_IN):
        await broker.admin.add_partitions(topic, 8)
    before = await broker.admin.topics()
    done = await ensure_topics(broker.admin, PIPES, grow=grow)
    assert (done.created, done.grown) == ((), ())
    assert await broker.admin.topics() == before
    assert find_larger(before, PIPES) == [
        LargerTopic("a", 8, 2),
        LargerTopic("joined.out", 8, 6),
        LargerTopic(RETRY_IN, 8, 1),
        LargerTopic(CONTROL, 8, 1),
    ]


class _Watched:
    """An admin that asks for the marks at each creation."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.marked: dict[str, set[str]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker.admin, name)

    async def create_topic(self, spec: TopicSpec) -> None:
        self.marked[spec.name] = set(await read_key_marks(self._broker.reader))
        await self._broker.admin.create_topic(spec)


async def test_a_stream_is_marked_before_it_can_have_events(broker: Broker) -> None:
    """Broken: after a crash between both, a stream whose events have keys counts as one without; or an older stream does."""
    for name in ("old", "empty", "keyed"):
        await broker.admin.create_topic(TopicSpec(name, 2))
    await append(broker, "old", [Record(None, b"{}", 1_700_000_000_000)], 1)
    names = ("old", "empty", "new", "keyed")
    pipes = PipeFile.model_validate({"streams": {name: {"partitions": 2} for name in names}})
    watched = _Watched(broker)
    async with Producer(broker.appender) as producer:
        await broker.admin.create_topic(TopicSpec(CONTROL, 1))
        await write_key_marks(producer, ["keyed"], "seen", "ingest")
        recorder = Recorder(broker, producer, "me@here")
        for _ in range(2):
            await ensure_topics(cast("Admin", watched), pipes, recorder=recorder)
    assert watched.marked["new"] == {"empty", "new", "keyed"}
    marks = await read_key_marks(broker.reader)
    assert {name: mark.state for name, mark in marks.items()} == {"empty": "none", "new": "none", "keyed": "seen"}
    held = await broker.reader.describe(CONTROL)
    assert held[0].end == 3, "a second start marks nothing again"


async def test_whether_a_stream_is_compacted_never_changes_silently(broker: Broker) -> None:
    """Broken: a table lacks what retention removed before, or a stream loses events that its file promises to keep."""
    plain, compacted = (PipeFile.model_validate({"streams": {"a": {"compact": on}}}) for on in (False, True))
    await ensure_topics(broker.admin, plain)
    with pytest.raises(UnsafeTopic, match="exists and is not compacted"):
        await ensure_topics(broker.admin, compacted)
    await broker.admin.delete_topic("a")
    await ensure_topics(broker.admin, compacted)
    assert await broker.admin.compacted(["a", "b"]) == {"a"}
    larger = PipeFile.model_validate({"streams": {"a": {"compact": True, "partitions": 8}}})
    with pytest.raises(UnsafeTopic, match="would move keys"):
        await ensure_topics(broker.admin, larger, grow=True)
    assert (await broker.admin.topics())["a"] == 4
    with pytest.raises(UnsafeTopic, match="exists and is compacted"):
        await ensure_topics(broker.admin, plain)


async def test_a_fleet_starts_while_the_cluster_of_a_destination_is_down(
    tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a machine is started again, and the whole fleet stays down because the Kafka of one receiver is; or nobody is told
    that a topic or a password there is wrong."""
    target = {"name": "d", "topic": {"name": "erp.in", "on": "msk"}}
    plain = {"streams": {"a": {}}, "pipes": {"p": {"sources": ["a"], "destinations": [{"name": "e", "stream": "a"}]}}}
    pipes = {"p": {"sources": ["a"], "destinations": [target]}}
    file = PipeFile.model_validate({**plain, "brokers": {"msk": "kafka://h:1"}, "pipes": pipes})
    await ensure_topics(broker.admin, PipeFile.model_validate(plain))
    answer: BrokerError | None = Unavailable("no node answers")

    @asynccontextmanager
    async def opening() -> AsyncIterator[Broker]:
        if answer is not None:
            raise answer
        async with LogBroker.open(str(tmp_path / "msk")) as opened:
            yield opened

    def several() -> AbstractAsyncContextManager[Broker]:
        return open_several(broker, {"msk": opening}, Places({}, target_homes(file)))

    async with several() as both:
        assert (await find_others(both.admin, file)).silent == {"msk": "broker msk of the pipe file: no node answers"}
        assert (await ensure_topics(both.admin, file)).created == ()
        with monkeypatch.context() as silent:
            silent.setattr(provision, "ANSWER_S", 0.01)
            silent.setattr(both.admin, "present", lambda _: asyncio.Event().wait())
            assert (await find_others(both.admin, file)).silent == {"msk": "no answer within 0.01 s"}
    answer = AccessRefused("a wrong password")
    async with several() as both:
        with pytest.raises(AccessRefused, match="a wrong password"):
            await ensure_topics(both.admin, file)
    answer = None
    async with several() as both:
        with pytest.raises(NoSuchTopics, match=r"there is no topic erp\.in on broker msk"):
            await ensure_topics(both.admin, file)


class _OneCluster:
    """An `Admin` over a cluster that has two names in the pipe file. full: the names on the cluster, by those in the fleet."""

    def __init__(self, full: dict[str, str]) -> None:
        self._full = full

    async def topics(self) -> dict[str, int]:
        return dict.fromkeys(self._full, 1)

    async def present(self, topics: Collection[str]) -> frozenset[str]:
        return frozenset(topics) & self._full.keys()

    async def incarnation(self, topic: str) -> str:
        return f"id of {self._full[topic]}"


@pytest.mark.parametrize("topic", ["events", "loop.retry", "loop.dead", "penstock.audit"])
@pytest.mark.parametrize("prefix", ["", "acme."])
async def test_a_topic_of_ours_by_another_name_of_its_cluster_is_refused(topic: str, prefix: str) -> None:
    """Broken: events go round for ever; or what a destination gets is read as a retry, a dead letter or a record of the fleet."""
    destinations = [
        {"name": "hook", "webhook": {"url": "https://example.org"}},
        {"name": "copy", "topic": {"name": f"{prefix}{topic}", "on": "second"}},
    ]
    file = {
        "brokers": {"second": "kafka://one.example:9092"},
        "streams": {"events": {"topic": f"{prefix}events"}, "bills": {}},
        "pipes": {"loop": {"sources": ["events"], "destinations": destinations}},
    }
    pipes = PipeFile.model_validate(file)
    full = {spec.name: f"{prefix}{spec.name}" for spec in wanted_topics(pipes)}
    full |= {"events": f"{prefix}events", f"existing:second:{prefix}{topic}": f"{prefix}{topic}"}
    with pytest.raises(UnsafeTopic, match=rf"it is .* {topic}, and second and default are the same cluster"):
        await ensure_topics(cast("Admin", _OneCluster(full)), pipes)
    read = {**file, "streams": {"events": {"topic": f"{prefix}{topic}", "on": "second"}, "bills": {}}}
    read["pipes"] = {"loop": {"sources": ["bills"], "destinations": destinations[:1]}}
    full["events"] = f"{prefix}{topic}"
    if topic != "events":
        with pytest.raises(UnsafeTopic, match=rf"it is our own topic {topic}, and second and default"):
            await ensure_topics(cast("Admin", _OneCluster(full)), PipeFile.model_validate(read))
