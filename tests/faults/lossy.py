"""A pipe that loses chosen events at expel, while processes are killed and its group is rewound: what does the ledger say?"""

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker
from services.core.broker.errors import Unavailable
from services.core.ledger.report import TELEMETRY, decode_report
from services.core.pipes import load_pipes
from services.core.provision import ensure_topics
from services.observer.ledger.explain import explain
from services.observer.ledger.flow import Flow, read_flow
from services.observer.ledger.recovery import recover
from services.observer.ledger.table import Table
from tests.integration.expel_process import Expel, hook, kill_at_end
from tests.integration.ingest_process import running
from tests.support import lossy_expel
from tests.unit.expel.receiver import DEADLINE, open_receiver

ROUNDS, REQUEST = 3, 100
MEDIA = "application/cloudevents-batch+json"
LATER_MS = 10 * 60_000
"""So much later does the observer look: by then all minutes are final."""


@dataclass(frozen=True)
class Verdict:
    """lost, named: ids. missing: over all minutes, at expel and end to end. received: requests' events, duplicates too."""

    sent: int
    lost: list[str]
    received: int
    accepted: int
    missing: tuple[int, int]
    named: list[str]

    def complaints(self) -> list[str]:
        """What is not as it must be; nothing, or the ledger is wrong."""
        count = len(self.lost)
        found = []
        if self.received <= self.sent - count:
            found.append("nothing came twice: the run shows less than it should")
        if self.accepted != self.sent:
            found.append(f"{self.accepted} of {self.sent} events are accepted")
        if self.missing != (count, count):
            found.append(f"{self.missing} events are missing at expel and end to end, {count} were lost")
        if self.named != self.lost:
            found.append(f"{sorted({*self.named} ^ {*self.lost})[:10]} are named or lost, not both")
        return found


class LossyExpel(Expel):
    """Loses what is marked."""

    module = lossy_expel.__name__

    def write_pipes(self) -> Path:
        """One stream, one pipe: what ingest and expel run, and nothing that others on the same broker have."""
        path = self.folder / "lossy.yaml"
        pipes = {self.pipe: {"sources": [self.stream], "destinations": self.destinations}}
        path.write_bytes(orjson.dumps({"streams": {self.stream: {}}, "pipes": pipes}))
        return path


async def lose_some(folder: Path, url: str, name: str, events: int, lost: int, seed: int) -> Verdict:
    """Send so many events, lose some of them, kill -9 ingest and expel three times, rewind the group to its beginning.

    name: of the stream and the pipe. events: a multiple of 300.
    """
    numbers = sorted(random.Random(seed).sample(range(events), lost))
    bodies = _make_bodies(events, numbers)
    async with open_receiver() as receiver, open_broker(url) as broker:
        expel = LossyExpel(folder, broker, url, [hook("hook", receiver.url)], stream=name, pipe=name)
        pipes = await asyncio.to_thread(load_pipes, expel.write_pipes())
        await ensure_topics(broker.admin, pipes)
        flow = read_flow(pipes)
        async with kill_at_end(expel):
            each = len(bodies) // ROUNDS
            for number in range(ROUNDS):
                await expel.start()
                async with running(folder, broker=url, pipes=expel.write_pipes()) as ingest:
                    await ingest.until_ready()
                    for body in bodies[number * each : (number + 1) * each]:
                        assert (await ingest.post(body, name, media=MEDIA)).status == 200
                    enough = (number + 1) * each * REQUEST * 2 // 3
                    await receiver.wait_for(lambda seen, enough=enough: len(seen.accepted) >= enough)  # type: ignore[misc]
                    await expel.stop(signal.SIGKILL)
                    await ingest.end(signal.SIGKILL)
            await _rewind(broker, expel)
            await expel.start()
            await receiver.wait_for(lambda seen: len({*seen.accepted}) == events - lost)
            async with asyncio.timeout(DEADLINE):  # what was delivered before a kill and not told is told now
                while _count_missing(await _join(broker, flow), name)[1] > lost:
                    await asyncio.sleep(0.2)
            assert await expel.stop() == 0
        table = await _join(broker, flow)
        accepted = sum(table.row(name, minute, 0).accepted for minute in table.minutes(name))
        named = await _name(table, broker, name)
        missing = _count_missing(table, name)
    return Verdict(events, [f"e{n:06d}" for n in numbers], len(receiver.accepted), accepted, missing, named)


async def _rewind(broker: Broker, expel: Expel) -> None:
    """Let the group read everything again, once its killed member is gone."""
    group = f"{expel.pipe}.hook"
    partitions = await broker.admin.committed(group, expel.stream)
    async with asyncio.timeout(DEADLINE):
        while True:
            try:
                return await broker.admin.set_committed(group, expel.stream, dict.fromkeys(partitions, 0))
            except Unavailable:
                await asyncio.sleep(0.2)


async def _join(broker: Broker, flow: Flow) -> Table:
    """As the observer does it, ten minutes later: all reports, and what killed ingests did not tell."""
    table, offset = Table(flow), 0
    while (batch := await broker.admin.read(TELEMETRY, 0, offset, max_records=1000)) is not None:
        for record in batch.records:
            table.apply(decode_report(record.value))
        offset = batch.offsets[-1] + 1
    async for report in recover(table, broker.admin, int(time.time() * 1000) + LATER_MS):
        table.apply(report)
    return table


def _count_missing(table: Table, pipe: str) -> tuple[int, int]:
    rows = [table.row(pipe, minute, 0) for minute in table.minutes(pipe)]
    return sum(row.steps[0].missing for row in rows), sum(row.missing for row in rows)


async def _name(table: Table, broker: Broker, pipe: str) -> list[str]:
    """The ids of what is missing, over all minutes."""
    found: list[str] = []
    for minute in table.minutes(pipe):
        said = await explain(table, broker.admin, pipe, minute)
        assert said.complete
        found += [one.event_id or f"{one.origin} not found" for one in said.named]
    return sorted(found)


def _make_bodies(count: int, lost: Sequence[int]) -> list[bytes]:
    """Requests of events with ids of their own."""
    chosen = set(lost)
    events = [
        {"specversion": "1.0", "type": "t", "source": "s", "id": f"e{n:06d}", "data": {"n": n, "lost": n in chosen}}
        for n in range(count)
    ]
    return [orjson.dumps(events[start : start + REQUEST]) for start in range(0, count, REQUEST)]
