"""The whole way on the embedded log: what is lost is in the table, exactly, and named; what came twice hides none of it."""

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import orjson

from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.errors import Unavailable
from services.core.broker.log import LogBroker
from services.core.ledger.report import TELEMETRY, decode_report
from services.core.pipes import load_pipes
from services.core.provision import ensure_topics
from services.observer.ledger.explain import explain
from services.observer.ledger.flow import Flow, read_flow
from services.observer.ledger.recovery import recover
from services.observer.ledger.table import Table
from tests.integration.expel_process import Expel, hook, kill_at_end
from tests.integration.ingest_process import log_url, running
from tests.support import lossy_expel
from tests.unit.expel.receiver import DEADLINE, open_receiver

STREAM = "plain"
ROUNDS, REQUESTS, REQUEST = 3, 17, 100
LOST = 23
MEDIA = "application/cloudevents-batch+json"
LATER_MS = 10 * 60_000


class LossyExpel(Expel):
    """Loses what is marked."""

    module = lossy_expel.__name__


async def rewind(broker: Broker, group: str) -> None:
    """Let the group read everything again, once its killed member is gone."""
    partitions = await broker.admin.committed(group, STREAM)
    async with asyncio.timeout(DEADLINE):
        while True:
            try:
                return await broker.admin.set_committed(group, STREAM, dict.fromkeys(partitions, 0))
            except Unavailable:
                await asyncio.sleep(0.2)


async def join(broker: Broker, flow: Flow) -> Table:
    """As the observer does it, ten minutes later: all reports, and what killed ingests did not tell."""
    table, offset = Table(flow), 0
    while (batch := await broker.admin.read(TELEMETRY, 0, offset, max_records=1000)) is not None:
        for record in batch.records:
            table.apply(decode_report(record.value))
        offset = batch.offsets[-1] + 1
    async for report in recover(table, broker.admin, int(time.time() * 1000) + LATER_MS):
        table.apply(report)
    return table


def count_missing(table: Table) -> int:
    return sum(table.row("late", minute, 0).missing for minute in table.minutes("late"))


async def named(table: Table, broker: Broker) -> list[str]:
    """The ids of what is missing, over all minutes."""
    found: list[str] = []
    for minute in table.minutes("late"):
        said = await explain(table, broker.admin, "late", minute)
        assert said.complete
        found += [one.event_id or f"{one.origin} not found" for one in said.named]
    return sorted(found)


def make_bodies(lost: Sequence[int]) -> list[bytes]:
    """Requests of events with ids of their own."""
    count, chosen = ROUNDS * REQUESTS * REQUEST, set(lost)
    events = [
        {"specversion": "1.0", "type": "t", "source": "s", "id": f"e{n}", "data": {"n": n, "lost": n in chosen}}
        for n in range(count)
    ]
    return [orjson.dumps(events[start : start + REQUEST]) for start in range(0, count, REQUEST)]


async def test_exactly_what_is_lost_is_missing_and_named(tmp_path: Path) -> None:
    """Broken: a duplicate hides a loss, a crash or a rewind invents one, or nobody can say which events are gone."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    total = ROUNDS * REQUESTS * REQUEST
    lost = sorted(random.Random(seed).sample(range(total), LOST))
    bodies = make_bodies(lost)
    (tmp_path / "expel").mkdir()
    async with open_receiver() as receiver, LogBroker.open(str(tmp_path / "log")) as broker:
        expel = LossyExpel(tmp_path / "expel", broker, log_url(tmp_path), [hook("hook", receiver.url)], stream=STREAM)
        pipes = await asyncio.to_thread(load_pipes, expel.write_pipes())
        flow = read_flow(pipes)
        await ensure_topics(broker.admin, pipes)
        await broker.admin.create_topic(TopicSpec("orders"))  # ingest serves it, too
        async with kill_at_end(expel):
            for number in range(ROUNDS):
                await expel.start()
                async with running(tmp_path) as ingest:
                    await ingest.until_ready()
                    for body in bodies[number * REQUESTS : (number + 1) * REQUESTS]:
                        assert (await ingest.post(body, STREAM, media=MEDIA)).status == 200
                    enough = (number + 1) * REQUESTS * REQUEST * 2 // 3
                    await receiver.wait_for(lambda seen, enough=enough: len({*seen.accepted}) >= enough)  # type: ignore[misc]
                    await expel.stop(signal.SIGKILL)
                    await ingest.end(signal.SIGKILL)
            await rewind(broker, "late.hook")
            await expel.start()
            await receiver.wait_for(lambda seen: len({*seen.accepted}) == total - LOST)
            async with asyncio.timeout(DEADLINE):  # what was delivered before a kill and not told is told now
                while count_missing(await join(broker, flow)) > LOST:
                    await asyncio.sleep(0.2)
            assert await expel.stop() == 0
        assert len(receiver.accepted) > total - LOST, "nothing came twice: the test shows less than it should"
        table = await join(broker, flow)
        rows = [table.row("late", minute, 0) for minute in table.minutes("late")]
        assert sum(row.accepted for row in rows) == total
        assert [sum(row.steps[0].missing for row in rows), sum(row.missing for row in rows)] == [LOST, LOST]
        assert await named(table, broker) == sorted(f"e{n}" for n in lost)
