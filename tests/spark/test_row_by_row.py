"""A row-by-row transform from log to log: what goes in comes out, once, in order, with its identity; or is a dead letter."""

from collections import Counter
from typing import Any

import orjson
import pytest
from pyspark.sql import DataFrame, SparkSession

from services.core.broker.errors import Unavailable
from services.core.broker.partitioner import choose_partition
from services.core.broker.record import Record
from services.core.event import read_id
from services.core.undelivered import dead_letter
from spark.brokers.contract import BatchName
from spark.brokers.log import LogSparkBroker
from spark.jobs.dead_letters import Rejected, reject_bad_records
from spark.records import from_arrow
from spark.transforms.preparation import Prepared, prepare_pipes
from tests.spark.log_pipeline import NOW, LogPipeline, event, wait_for

FLIGHTS = "carrier STRING, delay INT"


def flight(number: int, **fields: object) -> Record:
    return event(number, orjson.dumps({"carrier": "UA", "delay": number} | fields))


def reasons(records: list[Record]) -> dict[str | None, str]:
    return {read_id(r): (r.header(dead_letter.REASON) or b"").decode() for r in records}


def test_sql_carries_events_on(pipeline: LogPipeline) -> None:
    """If this fails, events lose their id, key, time or headers in a transform, or come out in another order."""
    sent = [flight(n) for n in range(200)]
    pipeline.send(sent)
    pipeline.run(
        pipeline.pipe(columns=FLIGHTS, sql="SELECT event, carrier, delay * 2 AS twice FROM s WHERE delay % 2 = 0"), 200
    )
    out = pipeline.out
    expected = {read_id(r): r for r in sent if int(r.timestamp - NOW) % 2 == 0}
    assert sorted(read_id(r) or "" for r in out) == sorted(filter(None, expected))
    for record in out:
        original = expected[read_id(record)]
        assert (record.key, record.timestamp, record.headers) == (original.key, original.timestamp, original.headers)
        assert orjson.loads(record.value or b"") == {"carrier": "UA", "twice": (record.timestamp - NOW) * 2}
    by_key: dict[bytes | None, list[int]] = {}
    for record in out:
        by_key.setdefault(record.key, []).append(record.timestamp)
    assert all(times == sorted(times) for times in by_key.values())
    assert not pipeline.dead


def test_value_passes_byte_for_byte(pipeline: LogPipeline) -> None:
    """If this fails, a transform that only filters alters payloads (number formats, spaces, big integers)."""
    values = [b'{"a": 1.50, "b":9007199254740993 }', b"plain text", "\u00fcber \u2028".encode(), b""]
    pipeline.send([event(n, value) for n, value in enumerate(values)])
    pipeline.run(pipeline.pipe(sql="SELECT event, value FROM s"), 4)
    assert sorted(r.value or b"" for r in pipeline.out) == sorted(values)


def test_decimals_keep_their_digits_as_text(pipeline: LogPipeline) -> None:
    """If this fails, an amount loses digits in a receiver that reads floats, or other columns become texts."""
    pipeline.send([event(0, b'{"a": 12345678901234567.89}')])
    sql = """SELECT event, a, CAST(a AS DOUBLE) AS f, 7 AS n, CAST(NULL AS DECIMAL(3,1)) AS none,
             CAST(0 AS DECIMAL(20,18)) AS zero, named_struct(
                'in it', a, 'list', array(a, NULL), 'map', map('k', named_struct('x', a)), 'day', DATE'2026-11-22'
             ) AS `s s` FROM s"""
    pipeline.run(pipeline.pipe(columns="a DECIMAL(20,2)", sql=sql, decimals="string"), 1)
    (record,) = pipeline.out
    assert (record.value or b"").decode() == (
        '{"a":"12345678901234567.89","f":1.2345678901234568E16,"n":7,"none":null,"zero":"0.000000000000000000",'
        '"s s":{"in it":"12345678901234567.89","list":["12345678901234567.89",null],'
        '"map":{"k":{"x":"12345678901234567.89"}},"day":"2026-11-22"}}'
    )


def test_columns_that_change_after_a_crash(pipeline: LogPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a batch whose process ended between its output and its dead letters loses the records that its columns
    refused, when the columns of the next start take them for events."""
    write, calls = LogSparkBroker.write_records, list[str]()

    def end(broker: LogSparkBroker, *batch: Any) -> None:
        if calls:
            raise Unavailable("the process ends here")
        write(broker, *batch)
        calls.append(batch[2])

    sql = "SELECT event, delay FROM s"
    pipeline.send([flight(0), flight(1, delay="late"), flight(2)])
    with monkeypatch.context() as ending:
        ending.setattr(LogSparkBroker, "write_records", end)
        pipeline.start(pipeline.pipe(columns=FLIGHTS, sql=sql))
        wait_for(lambda: bool(pipeline.problem), "the end")
        pipeline.stop()
    assert "the process ends here" in (pipeline.problem or "")
    pipeline.states.clear()
    pipeline.run(pipeline.pipe(columns=FLIGHTS.replace("INT", "STRING"), sql=sql), 3)
    assert {read_id(record) for record in (*pipeline.out, *pipeline.dead)} == {"id-0", "id-1", "id-2"}


def test_many_bad_records_of_a_batch(pipeline: LogPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a batch most of whose records are bad takes the memory of the driver; or a crash between its output and
    its dead letters loses some of these, or stores them twice."""
    monkeypatch.setattr("spark.jobs.dead_letters.PIECE", 10)
    reject, held = reject_bad_records, list[int]()
    write, stored, ended = LogSparkBroker.write_records, Counter[bool](), list[bool]()

    def count(prepared: Prepared, raw: DataFrame) -> list[Rejected]:
        found = reject(prepared, raw)
        held.append(len(found))
        return found

    def end(broker: LogSparkBroker, session: object, records: Any, topic: str, batch: BatchName) -> bool:
        if topic == "p.out" and not ended:  # the first run ends before its output
            raise Unavailable("the process ends here")
        found = write(broker, session, records, topic, batch)  # type: ignore[arg-type]
        stored[found] += 1
        return found

    monkeypatch.setattr("spark.jobs.micro_batch.reject_bad_records", count)
    monkeypatch.setattr(LogSparkBroker, "write_records", end)
    pipeline.send([flight(n, delay="late" if n % 4 else 1) for n in range(60)])
    chosen = pipeline.pipe(columns=FLIGHTS, sql="SELECT event, delay FROM s")
    pipeline.start(chosen)
    wait_for(lambda: bool(pipeline.problem), "the end")
    pipeline.stop()
    assert "the process ends here" in (pipeline.problem or "")
    assert Counter(read_id(record) for record in pipeline.dead) == {f"id-{n}": 1 for n in range(60) if n % 4}
    assert stored[True] >= 5
    ended.append(True)
    pipeline.states.clear()
    pipeline.run(chosen, 60)
    assert Counter(read_id(record) for record in pipeline.out) == {f"id-{n}": 1 for n in range(0, 60, 4)}
    assert Counter(read_id(record) for record in pipeline.dead) == {f"id-{n}": 1 for n in range(60) if n % 4}
    assert pipeline.reported("dead") == {n for n in range(60) if n % 4}
    assert sum(sum(report.dead.values()) for report in pipeline.batches) == 45
    assert stored[False] >= 5  # known from the first run
    assert max(held) <= 10


def test_what_is_no_event_goes_to_dead_letters(pipeline: LogPipeline) -> None:
    """If this fails, one bad record stops the pipe, or vanishes, or its dead letter does not say why and where from."""
    good = flight(1)
    bad = [
        Record(b"k", None, NOW, ((("ce_id"), b"tombstone"),)),  # the deletion of a key: passed over, no dead letter
        Record(None, b"{}", NOW, ()),
        Record(b"k", b"{}", NOW, (("ce_id", b"\xff\xfe"),)),
        event(2, b"\xff\xfe"),
        event(3, b"not json"),
        event(4, b'[{"carrier":"UA","delay":1},{"carrier":"AA","delay":2}]'),
        event(5, b'{"carrier":"UA","delay":"late"}'),
        event(6, b'{"carrier":"UA","delay":99999999999}'),
        event(7, b'{"carrier":"UA","delay":1.5}'),
        event(8, b'{"carrier":"UA","delay":1'),
        event(9, b'{"carrier":"UA"}'),
        event(10, b"null"),
        event(11, b""),
    ]
    pipeline.send([*bad, good])
    pipeline.run(pipeline.pipe(columns="carrier STRING, delay INT NOT NULL", sql="SELECT event, delay FROM s"), 14)
    assert [read_id(r) for r in pipeline.out] == ["id-1"]
    dead = pipeline.dead
    found = reasons(dead)
    assert {key for key, reason in found.items() if reason == "bad_record"} == {None, "id-2"}
    assert {key for key, reason in found.items() if reason == "schema_mismatch"} == {f"id-{n}" for n in range(3, 12)}
    assert len(dead) == 12
    assert sum(sum(report.dead.values()) for report in pipeline.batches) == 12
    text = next(r for r in dead if read_id(r) == "id-3")
    stripped = dead_letter.strip(text)
    assert stripped == event(3, b"not json")
    assert text.header(dead_letter.PIPE) == b"p"
    assert text.header(dead_letter.NODE) == b"transform"
    topic, partition, _ = (text.header(dead_letter.SOURCE) or b"").decode().split(":")
    assert (topic, int(partition)) == ("s", choose_partition(text.key or b"", 3))


def test_sql_error_poisons_only_its_event(pipeline: LogPipeline) -> None:
    """If this fails, an event on which the SQL raises stops the pipe or takes others with it."""
    pipeline.send([flight(n, delay=0 if n in (3, 17) else n) for n in range(1, 21)])
    pipeline.run(pipeline.pipe(columns=FLIGHTS, sql="SELECT event, 100 / delay AS share FROM s"), 20)
    assert reasons(pipeline.dead) == {"id-3": "transform_error", "id-17": "transform_error"}
    assert b"DIVIDE_BY_ZERO" in (pipeline.dead[0].header(dead_letter.DETAIL) or b"")
    assert len({read_id(r) for r in pipeline.out}) == len(pipeline.out) == 18
    assert pipeline.read == 20


def test_python_error_poisons_only_its_event(pipeline: LogPipeline) -> None:
    """If this fails, a Python transform beside the pipe file does not run in workers, or one raising event stops it."""
    (pipeline.folder / "flights.py").write_text(PYTHON_TRANSFORM)
    pipeline.send([flight(n, carrier="XX" if n == 5 else "UA") for n in range(8)])
    pipeline.run(pipeline.pipe(columns=FLIGHTS, python="flights.py:lowered"), 8)
    assert reasons(pipeline.dead) == {"id-5": "transform_error"}
    assert "ValueError: no such carrier: XX" in (pipeline.dead[0].header(dead_letter.DETAIL) or b"").decode()
    assert {orjson.loads(r.value or b"")["carrier"] for r in pipeline.out} == {"ua"}
    assert len(pipeline.out) == 7


PYTHON_TRANSFORM = """
from pyspark.sql.functions import col, udf

NAMES = {"UA": "ua"}

@udf("string")
def lower(carrier):
    if carrier not in NAMES:
        raise ValueError(f"no such carrier: {carrier}")
    return NAMES[carrier]

def lowered(frame):
    return frame.select("event", lower(col("carrier")).alias("carrier"))
"""


def test_broken_transform_stops_and_rejects_nothing(pipeline: LogPipeline) -> None:
    """If this fails, a transform that fails on everything sends everything to the dead letters."""
    pipeline.send([flight(n, delay=0) for n in range(100)])
    pipeline.start(pipeline.pipe(columns=FLIGHTS, sql="SELECT event, 100 / delay AS share FROM s"))
    wait_for(lambda: pipeline.problem is not None, "the query fails")
    pipeline.stop()
    assert "TransformBroken" in (pipeline.problem or "")
    assert "DIVIDE_BY_ZERO" in (pipeline.problem or "")
    assert not pipeline.out
    assert not pipeline.dead


def test_several_sources(pipeline: LogPipeline) -> None:
    """If this fails, a pipe of two streams mixes them up, reads one twice, or loses one."""
    pipeline.send([flight(n) for n in range(20)])
    pipeline.send([flight(n) for n in range(100, 130)], topic="u")
    sql = "SELECT event, 's' AS stream, delay FROM s UNION ALL SELECT event, 'u' AS stream, delay FROM u"
    pipeline.run(pipeline.pipe(columns=FLIGHTS, sources=["s", "u"], sql=sql), 50)
    seen = {read_id(r): orjson.loads(r.value or b"")["stream"] for r in pipeline.out}
    assert seen == {f"id-{n}": "s" for n in range(20)} | {f"id-{n}": "u" for n in range(100, 130)}
    assert len(pipeline.out) == 50


def test_new_events(pipeline: LogPipeline) -> None:
    """If this fails, a transform cannot make new events with ids of its own."""
    pipeline.send([flight(n) for n in range(10)])
    sql = """SELECT concat(event.id, '-', leg) AS id, carrier AS key, event.time AS time, leg
             FROM s LATERAL VIEW explode(array(1, 2)) AS leg"""
    pipeline.run(pipeline.pipe(columns=FLIGHTS, sql=sql), 10)
    assert {read_id(r) for r in pipeline.out} == {f"id-{n}-{leg}" for n in range(10) for leg in (1, 2)}
    assert {r.key for r in pipeline.out} == {b"UA"}
    assert orjson.loads(pipeline.out[0].value or b"").keys() == {"leg"}


def test_backlog_comes_in_bounded_batches(pipeline: LogPipeline) -> None:
    """If this fails, a backlog becomes one giant batch that takes all memory."""
    for start in range(0, 50_000, 10_000):
        pipeline.send([flight(n) for n in range(start, start + 10_000)])
    pipeline.run(pipeline.pipe(columns=FLIGHTS, sql="SELECT event, value FROM s", max_events=5000), 50_000)
    assert max(report.read for report in pipeline.batches) <= 5000
    assert len({read_id(r) for r in pipeline.out}) == len(pipeline.out) == 50_000


def test_batch_and_stream_agree(pipeline: LogPipeline, spark: SparkSession) -> None:
    """If this fails, a batch that is computed again has other results than the live pipe had."""
    pipeline.send([flight(n) for n in range(500)])
    chosen = pipeline.pipe(columns=FLIGHTS, sql="SELECT event, delay FROM s WHERE delay % 3 = 0")
    pipeline.run(chosen, 500)
    prepared = prepare_pipes(spark, chosen, max_bytes=1_000_000)[0]
    broker = LogSparkBroker(str(pipeline.log))
    raw = broker.read_ranges(spark, broker.stored_ranges(spark, ["s"]))
    view = prepared.views["s"]
    batch = from_arrow(prepared.apply({"s": view.good(view.check(raw))}, spark).toArrow())
    assert sorted(batch, key=lambda r: r.timestamp) == sorted(pipeline.out, key=lambda r: r.timestamp)
