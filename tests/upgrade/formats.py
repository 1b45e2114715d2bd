"""Writes one of each record and file that outlives a process, or reads them: python -P formats.py write|read FOLDER

It runs under the last released version and under this one, and prints as JSON what the readers of its version found. So it uses
only names that both have, or that `former_names` knows.
"""

import tests.upgrade.former_names  # noqa: F401  # before the modules that it names

# isort: split
import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from pyroaring import BitMap

from services.core import audit
from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.kafka.offsets import CommitMetadata
from services.core.broker.kafka.positions import GroupStart
from services.core.broker.producer import Producer
from services.core.broker.reading import read_topic
from services.core.broker.record import Record, TopicPartition
from services.core.control.pauses import Pause, list_paused, write_pause
from services.core.event import ARRIVAL, ID, ORIGIN, Origin, read_arrival, read_id
from services.core.ledger.fields import FieldSet, FieldStats
from services.core.ledger.report import (
    SNAPSHOTS,
    TELEMETRY,
    LagSet,
    OriginSet,
    Reach,
    Report,
    decode_report,
    pack_numbers,
    unpack_numbers,
)
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.snapshot import copy_in, write_snapshot
from services.core.undelivered.dead_letter import DeadLetter, Position, make_dead_letter, strip
from services.core.undelivered.retry_state import RetryState, read_wait, unwrap, wrap
from services.core.undelivered.waiting import Bookmark, read_bookmark, write_bookmark
from services.fleet.folder import FleetState, ProcessState, read_state, write_state
from services.observer.follower import Follower
from services.observer.ledger.flow import read_flow
from services.observer.planned import Window
from spark.jobs.checkpoint import Identity

PIPES = PipeFile.model_validate(
    {
        "streams": {"s": {}},
        "pipes": {"p": {"sources": ["s"], "destinations": [{"name": "d", "webhook": {"url": "https://example.org/"}}]}},
    }
)
NOW = int(time.time() * 1000)
STATE = RetryState("p", "d", 3, 1, NOW - 5000, NOW + 60_000, "http_503", "busy", "s:0:4", NOW - 9000)
PATH = Path("/srv/penstock/pipes.yaml")
TOPICS = ("s", "p.retry", "p.dead", TELEMETRY, "penstock.control", "penstock.audit", SNAPSHOTS)


def event(number: int) -> Record:
    origin = Origin("abc123", 0, number).pack()
    return Record(b"key", b'{"n":%d}' % number, NOW, ((ID, b"e%d" % number), (ARRIVAL, b"%d" % NOW), (ORIGIN, origin)))


def reports() -> list[Report]:
    def one(outcome: Any, numbers: list[int], **more: Any) -> OriginSet:
        return OriginSet(outcome, "abc123", 0, more.pop("minute", None), pack_numbers(BitMap(numbers)), **more)

    fields = FieldSet(NOW // 60_000, 1, {"n": FieldStats(1, 0, 1, 4.0, 16.0, {7})})
    second = NOW // 1000
    figures: dict[str, Any] = {"spark": (10.0, 5, 1, 2, 2)} if "spark" in Report.__struct_fields__ else {}
    failed: dict[str, Any] = {"failures": ((f"{NOW}:http_503", "abc123", 0, pack_numbers(BitMap([1]))),)}
    failed = failed if "failures" in Report.__struct_fields__ else {}
    return [
        Report(
            node="ingest", instance="i", pipe="s", at_ms=NOW, sets=(one("accepted", [*range(9)], minute=NOW // 60_000),),
            lags=(LagSet("ingest_time", NOW // 60_000, 1, 5, {3: 1}),), reaches=(Reach("abc123", 0, 8),), fields=(fields,),
            in_doubt=(one("unknown", [9]),), closed=True,
        ),
        Report(
            node="expel", instance="x", pipe="p", destination="d", at_ms=NOW, behind_ms=7, breaker="half-open", returned_ms=0,
            held_ms=3, sets=(
                one("delivered", [0, 1]), one("retrying", [2], due=(second, second + 64)), one("skipped", [5]),
                one("dead", [3], due=(second, second + 1)), one("parked", [4], due=(second, second + 1)),
            ), **failed,
        ),
        Report(
            node="retrier", instance="r", pipe="p", destination="d", at_ms=NOW,
            sets=(one("released", [2], due=(second + 64, second + 65)), one("redriven", [3], due=(second + 2, second + 3))),
        ),
        Report(
            node="transform", instance="t", pipe="p", at_ms=NOW, sets=(one("passed", [0]), one("filtered", [1])), **figures,
        ),
    ]  # fmt: skip


async def write(broker: Broker, folder: Path) -> None:
    for name in TOPICS:
        await broker.admin.create_topic(TopicSpec(name, 1))
    async with Producer(broker.appender) as producer:

        async def store(topic: str, *records: Record) -> None:
            (await producer.send_to(topic, {0: list(records)})).raise_first()

        await store("s", *map(event, range(6)))
        await broker.admin.set_committed("p.d", "s", {0: 3})
        await store("p.retry", wrap(event(4), STATE, NOW))
        dead = make_dead_letter(
            event(5), reason="http_404", detail="gone", node="expel", pipe="p", destination="d", attempts=2,
            first_failure=NOW, source=TopicPartition("s", 0), offset=5, now_ms=NOW,
        )  # fmt: skip
        await store("p.dead", dead)
        await store(TELEMETRY, *(Record(f"{one.node}/{one.pipe}".encode(), one.encode(), NOW) for one in reports()))
        await write_pause(producer, "p/d", Pause("paused", "operator", "ann", NOW, "they move"))
        await write_bookmark(
            producer, Bookmark({TopicPartition("p.retry", 0): 1}, frozenset({"p/d"}), {"p/old": "p/d"}), NOW
        )
        for key in (b"transform:p", b"keys:s"):  # only this version reads these
            await store(
                "penstock.control",
                Record(key, b'{"state":"begun","checkpoint":"id","by":"transform","at":1,"version":1}', NOW),
            )
        letter = DeadLetter.of(Position("p.dead", 0, 0), dead, digest=audit.digest_of(dead))
        acted = [audit.ActedUpon(*letter.position, letter.digest)]
        await audit.write_entries(producer, audit.REDRIVE, "ann@host", {"pipe": "p"}, acted)
        follower = Follower(read_flow(PIPES), broker.reader, producer, lambda _turn: None)
        await follow(follower, announce=True)
    write_snapshot(folder / "snapshot", {str(PATH): b"streams: {}"})
    process = ProcessState("expel-1", "expel", 12, "127.0.0.1:1", 0, "log")
    write_state(folder, FleetState(1, "127.0.0.1:2", "log:///x", "pipes.yaml", "127.0.0.1:3", "127.0.0.1:4", [process]))
    identity = Identity(id="a", pipe="p", topics={"s": "1"}, transform="x", kind="per batch", ran=True, state="y")
    (folder / "penstock.json").write_bytes(msgspec.json.encode(identity))
    (folder / "start.json").write_bytes(msgspec.json.encode(GroupStart("id", 3)))
    (folder / "commit.txt").write_text(str(CommitMetadata(3, "id", 4)))


async def follow(follower: Follower, *, announce: bool = False) -> None:
    """Until it has read everything; at its end it stores a snapshot."""
    stopping = asyncio.Event()
    running = asyncio.create_task(follower.run(stopping))
    async with asyncio.timeout(300):
        while follower.catching_up:
            await asyncio.sleep(0.02)
    if announce:
        await follower.announce(Window("deploy", None, NOW, NOW + 3_600_000, "ci"))
    stopping.set()
    await running


async def read(broker: Broker, folder: Path) -> dict[str, Any]:
    found: dict[str, list[Record]] = {}
    for name in TOPICS:
        held = (await broker.reader.describe(name))[0]
        found[name] = [record async for batch in read_topic(broker.reader, name, 0, held) for record in batch.records]
    told = [decode_report(record.value) for record in found[TELEMETRY]]
    back, state = unwrap(found["p.retry"][0])
    dead = DeadLetter.of(Position("p.dead", 0, 0), found["p.dead"][0])
    known = {key: value for key, value in dead.as_json().items() if key != "dead_since"}  # 0.1 does not show it
    acts = [msgspec.json.decode(record.value or b"", type=audit.Entry) for record in found["penstock.audit"]]
    bookmark = await read_bookmark(broker.reader)
    fleet = await asyncio.to_thread(read_state, folder)
    identity = msgspec.json.decode((folder / "penstock.json").read_bytes(), type=Identity)
    start = msgspec.json.decode((folder / "start.json").read_bytes(), type=GroupStart)
    commit = CommitMetadata.parse((folder / "commit.txt").read_text())
    assert fleet is not None
    return {
        "events": [(read_id(one), read_arrival(one), str(one.header(ORIGIN)), str(one.value)) for one in found["s"]],
        "group": list((await broker.admin.positions("p.d", "s")).values()),
        "retry": [state.__getstate__(), read_id(back), read_wait(found["p.retry"][0])],
        "dead": [known, read_id(strip(dead.record))],
        "reports": [list(facts_of(one)) for one in told],
        "pauses": {name: pause.text for name, pause in (await list_paused(broker.reader, {})).items()},
        "bookmark": [sorted(map(str, bookmark.read.items())), sorted(bookmark.lanes), dict(bookmark.left)],
        "audit": [(one.action, one.who, one.filters, one.ranges, audit.covers(one, 0, one.digests)) for one in acts],
        "snapshot": copy_in(folder / "snapshot", PATH).read_bytes().decode(),
        "fleet": [fleet.pid, fleet.broker, fleet.processes[0].name],
        "checkpoint": [identity.id, identity.topics, identity.kind, identity.ran, identity.state],
        "start": [start.topic, start.partitions, str(commit)],
        "table": await read_table(broker),
    }  # fmt: skip


def facts_of(one: Report) -> Iterator[Any]:
    yield from (one.node, one.closed, one.behind_ms, one.breaker, one.returned_ms, one.held_ms, len(one.lags))
    yield from ((item.outcome, list(unpack_numbers(item.numbers)), item.due) for item in (*one.sets, *one.in_doubt))
    yield from (int(item.offset) for item in one.reaches)
    yield len(one.fields)


async def read_table(broker: Broker) -> Any:
    """From the snapshot and the reports. Only the snapshot has the announced windows."""
    async with Producer(broker.appender) as producer:
        follower = Follower(read_flow(PIPES), broker.reader, producer, lambda _turn: None)
        await follow(follower)
    rows = [follower.table.row("p", minute, NOW) for minute in follower.table.minutes("p")]
    figures = [
        (row.accepted, row.missing, row.waiting, [(one.node, one.outcomes) for one in row.steps]) for row in rows
    ]
    return [figures, [window.kind for window in follower.planned.all()]]


async def main(action: str, folder: Path) -> None:
    async with open_broker(f"log://{folder / 'log'}") as broker:
        if action == "write":
            await write(broker, folder)
        else:
            print(json.dumps(await read(broker, folder)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
