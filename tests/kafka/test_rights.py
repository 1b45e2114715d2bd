"""A Kafka with an authorizer: each service works with the rights that docs/kafka.md lists, and says which one is missing."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from aiokafka.protocol.admin import CreateAclsRequest, DeleteAclsRequest

from services.core.broker.connect import open_broker
from services.core.broker.contract import TopicSpec
from services.core.broker.errors import BrokerError, NotAllowed, OutcomeUnknown, TopicExists, Unavailable
from services.core.broker.existing import target_name
from services.core.broker.kafka.access import Access
from services.core.broker.kafka.cluster import Cluster, Timing
from services.core.broker.record import Record, TopicPartition
from services.core.broker.rights import Right, RightsReader, require_rights
from services.core.pipe_file.existing_topics import existing_topics
from services.core.pipe_file.pipes import load_pipes
from services.core.security.service_rights import Service as User
from services.core.security.service_rights import rights_of, show_rights
from tests.faults.fleet import Service
from tests.integration.fleet_process import DEADLINE, REPOSITORY, Desk
from tests.support.kafka import unique_name
from tests.support.pacing import Pace
from tests.support.ports import free_port
from tests.support.secured_kafka import SecuredKafka

pytestmark = pytest.mark.kafka
USERS: dict[str, User] = {
    "ingest": "ingest",
    "expel": "expel",
    "retrier": "retrier",
    "observer": "observer",
    "table": "table",
    "autoscaler": "autoscaler",
    "transform": "transform",
    "deployer": "command line",
}
"""The table's word, by user of the cluster."""
_LACKING = {
    "ingest": Right("DescribeConfigs", "topic", "penstock.telemetry"),
    "expel": Right("Write", "topic", "p.dead"),
    "retrier": Right("Write", "topic", "p.retry"),
    "observer": Right("Write", "topic", "penstock.observer"),
    "table": Right("DescribeConfigs", "topic", "latest"),
    "autoscaler": Right("Alter", "topic", "events"),
    "transform": Right("Write", "topic", "q.out"),
    "deployer": Right("Create", "topic", "results"),
}
"""What each user does not have at first."""
_MODULES = {"retrier": "services.global_retrier", "transform": "spark"}
_OPERATIONS = {"Read": 3, "Write": 4, "Create": 5, "Alter": 7, "Describe": 8, "DescribeConfigs": 10}
_KINDS = {"topic": 2, "group": 3}
_LITERAL, _ALLOW = 3, 3


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    """One broker for all tests here."""
    with SecuredKafka(tmp_path_factory.mktemp("secured")) as kafka:
        yield kafka


class Acls:
    """Grants and revokes, as an operator of the cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    async def grant(self, user: str, rights: Collection[Right]) -> None:
        for right in rights:
            answer = await self._cluster.ask_any(CreateAclsRequest(*_acl(user, right)))
            assert [row[0] for row in answer.creation_responses] == [0]

    async def revoke(self, user: str, right: Right) -> None:
        answer = await self._cluster.ask_any(DeleteAclsRequest(*_acl(user, right)))
        assert len(answer.filter_responses[0][2]) == 1, f"{right} was not there"


def _acl(user: str, right: Right) -> tuple[int, str, int, str, str, int, int]:
    return _KINDS[right.kind], right.name, _LITERAL, f"User:{user}", "*", _OPERATIONS[right.operation], _ALLOW


@asynccontextmanager
async def open_acls(kafka: SecuredKafka, folder: Path) -> AsyncIterator[Acls]:
    cluster = Cluster(kafka.address("scram"), "acls", Timing(), Access(kafka.write(folder)))
    try:
        yield Acls(cluster)
    finally:
        await cluster.close()


async def until(what: str, holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(600):
        pace = Pace()
        while not await holds():
            await pace.rest()
    assert what


async def test_each_service_works_with_its_rights_and_names_a_missing_one(kafka: SecuredKafka, tmp_path: Path) -> None:
    """Broken: the table of docs/kafka.md lacks a right, and a fleet that was given exactly these stands still; or a service that
    lacks one says that a topic does not exist, or waits without a word."""
    assert show_rights() in await asyncio.to_thread((REPOSITORY / "docs/kafka.md").read_text)
    desk = Desk(tmp_path)
    retried = "schedule: [1s], retry: {attempts: 1}"
    (tmp_path / "pipes.yaml").write_text(
        "streams: {events: {id: id, columns: id STRING}, copies: {}, results: {}, latest: {compact: true, key: id},\n"
        "          bills: {topic: others.bills, columns: id STRING}}\n"
        "pipes:\n  p:\n    sources: [events]\n    destinations:\n"
        f"      - {{name: d, webhook: {{url: 'http://127.0.0.1:{desk.hook_port}/', secret: {{file: webhook.secret}}}}}}\n"
        f"      - {{name: bad, webhook: {{url: 'http://127.0.0.1:{free_port()}/', {retried}}}}}\n"
        "      - {name: copy, stream: copies}\n"
        "  q:\n    sources: [events]\n    transform: {sql: 'SELECT event, id FROM events'}\n"
        "    destinations: [{name: copy, stream: results}]\n"
        "  r: {sources: [bills], destinations: [{name: erp, topic: {name: others.erp}}]}\n"
        "  s:\n    sources: [bills]\n    transform: {sql: 'SELECT event, id FROM bills'}\n"
        "    destinations: [{name: erp, topic: {name: others.sums}}]\n"
    )
    pipes = await asyncio.to_thread(load_pipes, tmp_path / "pipes.yaml")
    known = existing_topics(pipes).names
    rights = {
        user: [right._replace(name=known.get(right.name, right.name)) for right in rights_of(service, pipes)]
        for user, service in USERS.items()
    }
    urls = {user: kafka.url("scram", kafka.write(tmp_path / user, user=user)) for user in USERS}
    open_to = "--allow-networks", "127.0.0.0/8"
    tables = free_port()
    async with open_acls(kafka, tmp_path / "operator") as acls, AsyncExitStack() as running:
        for user, own in rights.items():
            assert _LACKING[user] in own
            await acls.grant(user, [right for right in own if right != _LACKING[user]])
        await _make_others(kafka.url("scram", kafka.write(tmp_path / "others")))
        apply = "apply", "-f", "pipes.yaml", "--broker", urls["deployer"], *open_to
        refused = await desk.run(*apply)
        assert refused.process.returncode != 0
        assert f"our user lacks {_LACKING['deployer']}. Try: an ACL for it" in refused.err
        await acls.grant("deployer", [_LACKING["deployer"]])
        applied = await desk.run(*apply)
        assert applied.process.returncode == 0, applied.out + applied.err
        more: dict[str, tuple[str, ...]] = {"expel": open_to}
        more["ingest"] = ("--listen", f"127.0.0.1:{desk.ingest_port}")
        more["observer"] = ("--listen", "127.0.0.1:0")
        more["table"] = ("--listen", f"127.0.0.1:{tables}", "--data", str(tmp_path / "tables"))
        more["transform"] = ("--data", str(tmp_path / "data"))
        services: dict[str, Service] = {}
        for user in ("transform", "ingest", "expel", "retrier", "observer", "table", "autoscaler"):
            arguments = ("--broker", urls[user], "--pipes", str(tmp_path / "pipes.yaml"), *more.get(user, ()))
            one = Service(user, _MODULES.get(user, f"services.{user}"), arguments, tmp_path)
            await one.start()
            running.push_async_callback(one.kill)
            services[user] = one
        for user, one in services.items():
            lacking = _LACKING[user]
            await until(f"{user} says what it lacks", _says(one, f"our user lacks {lacking}. Try: ACLs for it"))
            assert not await one.is_ready()
            await acls.grant(user, [lacking])
        for one in services.values():
            await one.wait_ready()
        async with desk.receive():
            sent = await desk.send(desk.write_events(20))
            assert sent.process.returncode == 0, sent.out + sent.err
            async with open_broker(kafka.url("scram", tmp_path / "operator" / "kafka.yaml")) as broker:
                reader = broker.reader

                async def all_arrived() -> bool:
                    topics = ("copies", "p.dead", "results", "others.erp", "others.sums")
                    ends = [await reader.describe(topic) for topic in topics]
                    stored = [sum(one.end for one in each.values()) for each in ends]
                    return len(desk.ids) == 20 and stored == [20, 20, 20, 1, 1]

                await until("delivered, copied, transformed and, after a wait at the retrier, dead", all_arrived)
        sent = await desk.send(desk.write_events(1), stream="latest")
        assert sent.process.returncode == 0, sent.out + sent.err
        async with aiohttp.ClientSession(f"http://127.0.0.1:{tables}") as client:

            async def is_served() -> bool:
                async with client.get("/v1/tables/latest?prefix=") as answer:
                    return len((await answer.json())["rows"]) == 1

            await until("the table has the row", is_served)
        for verb in (("destination", "pause", "d"), ("dead", "list"), ("destination", "resume", "d")):
            done = await desk.run(*verb, "--broker", urls["deployer"])
            assert done.process.returncode == 0, done.out + done.err
        said = await asyncio.to_thread(kafka.cluster.brokers[1].log.read_text)
        denied = set(
            re.findall(r"Principal = User:(\w+) is Denied operation = (\w+) .*? resource = (\w+:\w+:\S+)", said)
        )
        optional = {(user, "DESCRIBE_CONFIGS", "Cluster:LITERAL:kafka-cluster") for user in USERS}
        # Whether a stream was ever moved. Only a pipe file with `brokers` needs the right (HOMES).
        optional |= {(user, "DESCRIBE", "Topic:LITERAL:penstock.control") for user in ("retrier", "table")}
        at_first = {(user, _word(right.operation), f"Topic:LITERAL:{right.name}") for user, right in _LACKING.items()}
        assert denied <= optional | at_first
        async with asyncio.TaskGroup() as all_users:  # the cluster takes a moment for each change
            for user, own in rights.items():
                all_users.create_task(_lose_and_regain(acls, user, own, urls[user]))


async def _make_others(url: str) -> None:
    """The topics of others, and a record in one."""
    async with open_broker(url) as broker:
        for topic in ("others.bills", "others.erp", "others.sums"):
            with suppress(TopicExists):  # of a first try
                await broker.admin.create_topic(TopicSpec(topic, partitions=1))

        async def is_stored() -> bool:
            with suppress(Unavailable):  # a broker that has just started gives no producer id yet
                await broker.appender.append("others.bills", 0, [Record(None, b'{"id": "b"}', 1)], timeout=300)
                return True
            return False

        await until("a record of others is stored", is_stored)


def _word(operation: str) -> str:
    """As the log of the authorizer has it: DESCRIBE_CONFIGS."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", operation).upper()


async def _lose_and_regain(acls: Acls, user: str, rights: list[Right], url: str) -> None:
    async with open_broker(url) as broker:
        await _take_away(acls, user, rights, broker.admin)
        with pytest.raises(NotAllowed, match="lacks Describe on group strange"):
            await require_rights(broker, [*rights, Right("Describe", "group", "strange")])


async def _take_away(acls: Acls, user: str, rights: list[Right], admin: object) -> None:
    """Each is named when it is taken away with some others, and nothing else."""
    assert isinstance(admin, RightsReader)
    reader = admin

    def lacks(*missing: Right) -> Callable[[], Awaitable[bool]]:
        async def holds() -> bool:
            return await reader.missing_rights(rights) == list(missing)

        return holds

    await until(f"{user} has all", lacks())
    # Who has neither Read nor Write lacks Describe, too, and cannot say what else. So one operation at a time.
    operations = {right.operation: None for right in rights}
    halves = [[right for right in rights if right.operation == one][half::2] for one in operations for half in (0, 1)]
    for chosen in filter(None, halves):
        for right in chosen:
            await acls.revoke(user, right)
        await until(f"{user}: {chosen}", lacks(*chosen))
        await acls.grant(user, chosen)
        await until(f"{user} has {chosen}", lacks())


async def test_one_of_two_brokers_has_rights(kafka: SecuredKafka, tmp_path: Path) -> None:
    """Broken: a fleet with its own log cannot have a stream on a Kafka with an authorizer, or write to a topic of others there,
    needs more rights there than the table has for the stream, the topic and the groups, or does not say which one is missing."""
    desk, user, erp = Desk(tmp_path), "table", unique_name("erp")
    path = kafka.write(tmp_path / "second", user=user)
    (tmp_path / "pipes.yaml").write_text(
        f"brokers: {{second: '{kafka.url('scram', path)}'}}\n"
        "streams: {events: {id: id}, paid: {id: id, on: second}}\n"
        "pipes:\n  there:\n    sources: [events]\n"
        f"    destinations: [{{name: copy, stream: paid}}, {{name: erp, topic: {{name: {erp}, on: second}}}}]\n"
        "  back:\n    sources: [paid]\n    destinations:\n"
        f"      - {{name: d, webhook: {{url: 'http://127.0.0.1:{desk.hook_port}/', secret: {{file: webhook.secret}}}}}}\n"
    )
    pipes = await asyncio.to_thread(load_pipes, tmp_path / "pipes.yaml")
    of_all = (right for service in USERS.values() for right in rights_of(service, pipes))
    needed = {right for right in of_all if right.kind == "group" or right.name in ("paid", "penstock.groups")}
    of_all = (right for service in USERS.values() for right in rights_of(service, pipes))
    needed |= {right._replace(name=erp) for right in of_all if right.name == target_name(erp, "second")}
    lacking = Right("Read", "group", "back.d")
    url = kafka.url("scram", kafka.write(tmp_path / "maker"))
    async with open_acls(kafka, tmp_path / "operator") as acls, desk.receive(), open_broker(url) as owner:
        await owner.admin.create_topic(TopicSpec(erp, partitions=1))
        await acls.grant(user, needed - {lacking})
        said_before = len(await asyncio.to_thread(kafka.cluster.brokers[1].log.read_text))
        up = await desk.penstock(
            *("up", "--listen", f"127.0.0.1:{desk.ingest_port}", "--allow-networks", "127.0.0.0/8"),
            *("--ready-within", f"{DEADLINE:.0f}s"),
        )
        try:

            async def is_named() -> bool:
                return f"our user lacks {lacking}" in await asyncio.to_thread(_read_logs, desk.data)

            await until("expel says what it lacks", is_named)
            await acls.grant(user, [lacking])
            await up.until_said("Penstock runs")
            sent = await desk.send(desk.write_events(5))
            assert sent.process.returncode == 0, sent.out + sent.err

            async def all_arrived() -> bool:
                return len(desk.ids) == 5 and (await owner.reader.describe(erp))[0].end == 5

            await until("events go to the other broker and back", all_arrived)
            said = (await asyncio.to_thread(kafka.cluster.brokers[1].log.read_text))[said_before:]
            denied = set(re.findall(rf"User:{user} is Denied operation = (\w+) .*? resource = \w+:\w+:(\S+)", said))
            assert denied <= {("READ", "back.d"), ("DESCRIBE", "back.d"), ("DESCRIBE_CONFIGS", "kafka-cluster")}
        finally:
            await up.kill()


def _read_logs(data: Path) -> str:
    return "".join(path.read_text() for path in data.rglob("*.log"))


def _says(service: Service, text: str) -> Callable[[], Awaitable[bool]]:
    async def holds() -> bool:
        lines = await asyncio.to_thread(service.log.read_text)
        return any(text in json.loads(line).get("error", "") for line in lines.splitlines() if line.startswith("{"))

    return holds


async def test_a_right_is_revoked_while_events_flow(kafka: SecuredKafka, tmp_path: Path) -> None:
    """Broken: a writer or a reader whose right is revoked loses events, says nothing, or must be restarted when it is back."""
    topic, group = unique_name("revoked"), unique_name("readers")
    write, read = Right("Write", "topic", topic), Right("Read", "topic", topic)
    user = "ingest"
    rights = [write, read, Right("DescribeConfigs", "topic", topic), Right("Read", "group", group)]
    starts = [Right(operation, "topic", "penstock.groups") for operation in ("Read", "Write", "DescribeConfigs")]
    stored, seen = list[bytes](), list[bytes]()

    async def drain(_: object) -> None: ...

    async with open_acls(kafka, tmp_path / "operator") as acls, AsyncExitStack() as stack:
        async with open_broker(kafka.url("scram", kafka.write(tmp_path / "maker"))) as maker:
            await maker.admin.create_own_topics()
            await maker.admin.create_topic(TopicSpec(topic, partitions=1))
        await acls.grant(user, [*rights, *starts])
        broker = await stack.enter_async_context(
            open_broker(kafka.url("scram", kafka.write(tmp_path / "own", user=user)))
        )

        async def store(expected: str | None) -> None:
            """Append until one event is stored, or refused with these words."""
            said = ""
            async with asyncio.timeout(300):
                while expected is None or expected not in said:
                    value = unique_name("event").encode()
                    try:
                        await broker.appender.append(topic, 0, [Record(None, value, 1)], timeout=10)
                        stored.append(value)
                        if expected is None:
                            return
                    except (NotAllowed, OutcomeUnknown, Unavailable) as error:
                        said = str(error)
                    await asyncio.sleep(0.05)

        async def read_until(done: Callable[[list[str]], bool]) -> None:
            """As a group's loop does: it joins again after an error. done: gets what was said."""
            said = list[str]()
            async with asyncio.timeout(300):
                while not done(said):
                    try:
                        joining = broker.consumer(group, [topic], start="earliest", on_revoke=drain)
                        async with joining as consumer:
                            while not done(said):
                                batches = await consumer.poll(max_records=100, max_wait=0.5)
                                seen.extend(each.value or b"" for batch in batches for each in batch.records)
                                with suppress(Unavailable):
                                    await consumer.commit(
                                        {TopicPartition(topic, 0): batch.offsets[-1] for batch in batches}
                                    )
                    except BrokerError as error:
                        said.append(str(error))
                        await asyncio.sleep(0.2)

        await store(None)
        await read_until(lambda _: set(stored) <= set(seen))
        await acls.revoke(user, write)
        await store(f"our user lacks {write}. Try: an ACL for it")
        await acls.grant(user, [write])
        await store(None)
        await read_until(lambda _: set(stored) <= set(seen))
        await acls.revoke(user, read)
        await store(None)
        await read_until(lambda said: any(f"our user lacks {read}" in text for text in said))
        await acls.grant(user, [read])
        await read_until(lambda _: set(stored) <= set(seen))
