"""A batch whose output is too large, a process without progress or without Java. test_service.py ends real processes."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace

import orjson
import pytest
from pyspark.sql import DataFrame, SparkSession

from services.core.broker.record import Record
from services.core.event import read_id
from services.core.process.lifecycle import Supervision
from services.core.undelivered import dead_letter
from spark.brokers.log import LogSparkBroker
from spark.health import PipesHealth, QueryState, Watchdog
from spark.jobs.attempts import SuspectLock
from spark.records import OffsetRange
from spark.service import BatchStuckError, JavaEndedError, watch_java
from tests.spark.log_pipeline import LogPipeline, event, wait_for

POISON = 1


def amounts(*events: int) -> list[Record]:
    return [event(n, orjson.dumps({"delay": n})) for n in events]


def reason(letter: Record) -> str:
    return (letter.header(dead_letter.DETAIL) or b"").decode()


def test_one_event_of_four_million_rows(pipeline: LogPipeline) -> None:
    """If this fails, one event takes all memory of Java, and its pipe, and the others beside it, stand still for good."""
    pipeline.send(amounts(*range(4)))
    sql = f"""SELECT concat(event.id, '-', n) AS id, event.key AS key, repeat('x', 100) AS text
              FROM s LATERAL VIEW explode(sequence(1, IF(delay = {POISON}, 4000000, 2))) AS n"""
    pipeline.run(pipeline.pipe(columns="delay INT", sql=sql), 4)
    assert [read_id(letter) for letter in pipeline.dead] == [f"id-{POISON}"]
    assert "rows come out of one task" in reason(pipeline.dead[0])
    expected = {f"id-{n}-{row}" for n in range(4) if n != POISON for row in (1, 2)}
    assert Counter(map(read_id, pipeline.out)) == Counter(expected)
    assert pipeline.reported("dead") == {POISON}


def test_more_output_than_one_batch_may_have(pipeline: LogPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a batch whose events are all right, but too many for the memory together, is never done, or each of its
    parts reads all of it."""
    monkeypatch.setattr("spark.brokers.contract.MAX_ROWS", 30)
    read, parts = LogSparkBroker.read_ranges, list[int]()

    def count(broker: LogSparkBroker, session: SparkSession, ranges: Sequence[OffsetRange]) -> DataFrame:
        parts.append(sum(part.end - part.start for part in ranges))
        return read(broker, session, ranges)

    pipeline.send(amounts(*range(200)))
    monkeypatch.setattr(LogSparkBroker, "read_ranges", count)
    pipeline.run(pipeline.pipe(columns="delay INT", sql="SELECT event, delay FROM s"), 200)
    assert not pipeline.dead
    assert sorted(map(read_id, pipeline.out)) == sorted(f"id-{n}" for n in range(200))  # type: ignore[type-var]
    assert pipeline.reported("passed") == set(range(200))
    assert not pipeline.reported("filtered")
    by_key: dict[bytes | None, list[int]] = {}
    for record in pipeline.out:
        by_key.setdefault(record.key, []).append(record.timestamp)
    assert all(times == sorted(times) for times in by_key.values())
    warm_up = 60  # the newest twenty of each partition
    assert {*parts} - {warm_up} == {5, 13}


class Java:
    def __init__(self, *statuses: int | None) -> None:
        self.statuses, self.killed = list(statuses), False

    def poll(self) -> int | None:
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    def kill(self) -> None:
        self.killed = True


async def watched(java: Java, health: PipesHealth) -> None:
    async with asyncio.TaskGroup() as group:
        await watch_java(java, health, Supervision(group))


async def test_a_process_without_java_ends() -> None:
    """If this fails, a service whose Java is gone stays, and nobody starts another."""
    with pytest.raises(ExceptionGroup) as caught:
        await watched(Java(None, 3), PipesHealth(["p"]))
    assert caught.group_contains(JavaEndedError, match="out of memory")


async def test_a_batch_without_progress() -> None:
    """If this fails, a pipe that does nothing looks ready, or holds its process for good."""
    now = 0.0
    health, watchdog = PipesHealth(["p"]), Watchdog(100.0, clock=lambda: now)
    health.record_state(QueryState("p", None, 0))
    health.add_watchdog("p", watchdog)
    with watchdog.watching("p:1", "batch 3"):
        assert health.ready() is None
        now = 21.0
        assert health.ready() == "p: batch 3 has made no progress for 21 s"
        assert health.stuck() is None
        now = 101.0
        java = Java(None)
        with pytest.raises(ExceptionGroup) as caught:
            await watched(java, health)
        assert caught.group_contains(
            BatchStuckError, match="p: batch 3 has made no progress for 101 s; the process ends"
        )
        assert java.killed
    assert health.ready() is None


def test_who_ended_fewer_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, of two pipes one waits for ever for one that ends the process each time; or it is blamed for it."""
    now, asked = [0.0], set[int]()

    def monotonic() -> float:
        asked.add(threading.get_ident())
        return now[0]

    monkeypatch.setattr("spark.jobs.attempts.time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    suspects, order, stop = SuspectLock(settle_s=0.3), list[int](), threading.Event()

    def go(ended: int) -> None:
        with suspects.acquire(ended, stop.is_set):
            order.append(ended)

    threads = [threading.Thread(target=go, args=[ended]) for ended in (4, 2, 1)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(asked) == 2 and order == [1], "both know when their turn is")
    now[0] = 0.35
    wait_for(lambda: order == [1, 2], "the second")
    now[0] = 1.0
    for thread in threads:
        thread.join(30)
    assert order == [1, 2, 4]
