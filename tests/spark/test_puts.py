"""What a task does with its output before and while it puts it to Kinesis. Without Spark and without the service."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pyarrow as pa
import pytest

from services.core.broker.kinesis.blocking import BlockingKinesis
from services.core.broker.record import Batch, Record
from services.core.event import ORIGIN
from spark.records import OUT_SCHEMA, to_arrow
from spark.reports import read_lags
from spark.sources import puts
from spark.sources.puts import gather, put_rows, put_task

NOW = 1_700_000_000_000


class Sent:
    """In place of a connection: what was put, and to which turn."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.turns: set[int] = set()

    def send(self, topic: str, records: Sequence[Record], turn: int) -> None:
        self.records += records
        self.turns.add(turn)


def rows(records: Sequence[Record]) -> Any:
    return to_arrow(Batch("t", 0, range(len(records)), records), OUT_SCHEMA)


def event(number: int, *headers: tuple[str, bytes]) -> Record:
    return Record(b"k", b"%d" % number, NOW + number, (("ce_id", b"%d" % number), *headers))


def test_a_transform_that_fails_puts_nothing_of_its_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, each event on which a transform raises writes the events before it twice."""
    sent = Sent()

    def computed() -> Iterator[Any]:
        yield rows([event(1)])
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        put_rows(cast(BlockingKinesis, sent), "t", 0, computed())
    assert not sent.records
    monkeypatch.setattr(puts, "HELD_BYTES", 1)
    with pytest.raises(ZeroDivisionError):
        put_rows(cast(BlockingKinesis, sent), "t", 0, computed())
    assert len(sent.records) == 1, "a large output is not held as a whole"


def test_rows_are_put_in_order_or_by_their_time() -> None:
    """If this fails, the windows of an aggregate come out in the order of its shuffle, or events of a key change places."""
    mixed = [event(number) for number in (3, 1, 2, 1)]
    for by_time in (False, True):
        sent = Sent()
        batches = [rows(mixed[:2]), rows(mixed[2:])]
        assert put_rows(cast(BlockingKinesis, sent), "t", 7, batches, by_time=by_time) == 4
        assert sent.records == (sorted(mixed, key=lambda record: record.timestamp) if by_time else mixed)
        assert sent.turns == {7}


def test_a_task_tells_what_it_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, the ledger misses events that were written, or counts some that were not; or lags are wrong."""
    sent = Sent()
    monkeypatch.setattr(puts, "connection", lambda _url: sent)
    records = [event(n, (ORIGIN, b"run:0:%d" % n), ("x", b"y")) for n in range(500)] + [event(500)]
    whole = rows(records)
    slices = [whole.slice(100, 401), whole.slice(0, 100), rows([])]
    (told,) = put_task("kinesis://x", "t", 5, NOW + 1000, "plain", slices)
    assert sent.records == records[100:] + records[:100]
    (row,) = told.to_pylist()
    assert row["events"] == 501
    assert Counter(row["origins"].split()) == Counter(f"run:0:{n}" for n in range(500))
    ages = read_lags(row["lags"])
    assert ages.total() == 501
    assert abs(sum(age * events for age, events in ages.items()) - sum(1000 - n for n in range(501))) < 501 * 3
    (timed,) = put_task("kinesis://x", "t", 5, NOW, "timed", [whole.slice(0, 2)])
    assert timed.to_pylist()[0]["origins"] == f"run:0:0:{NOW} run:0:1:{NOW + 1}"


def test_each_record_has_one_origin() -> None:
    """If this fails, a header that a record has twice counts as two events, or one without a value as an event."""
    twice = event(1, (ORIGIN, b"run:0:1"), (ORIGIN, b"run:0:9"))
    column = rows([event(0), twice, event(2, (ORIGIN, b"run:0:2"))]).column("headers")
    times = pa.array([10, 11, 12])
    assert gather(column) == ["run:0:1", "run:0:2"]
    assert gather(column, times) == ["run:0:1:11", "run:0:2:12"]
    empty = pa.array([None, [{"key": ORIGIN, "value": None}], [{"key": ORIGIN, "value": b"a:0:1"}]], column.type)
    assert gather(empty, times) == ["a:0:1:12"]
