"""What a task does with its output before and while it puts it to Kinesis. Without Spark and without the service."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from services.core import metrics
from services.core.broker.kinesis.blocking import BlockingKinesis
from services.core.broker.record import Batch, Record
from spark.records import OUT_SCHEMA, to_arrow
from spark.sources import puts
from spark.sources.puts import Put, add_counters, put_rows, put_task

NOW = 1_700_000_000_000


class Sent:
    """In place of a connection: what was put, under which names, and to which turn."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.turns: set[int] = set()
        self.names: list[str] = []

    def put(self, topic: str, records: Sequence[Record], turn: int, name: str) -> None:
        self.records += records
        metrics.BROKER_PARTITION_BYTES.labels(topic, "1").inc(7)  # as an appender of a worker does
        self.turns.add(turn)
        self.names.append(name)

    def of(self, batch: int = 3, task: int = 4) -> Put:
        return Put(cast(BlockingKinesis, self), "t", "w", batch, task)


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
        put_rows(sent.of(), computed())
    assert not sent.records
    monkeypatch.setattr(puts, "HELD_BYTES", 1)
    with pytest.raises(ZeroDivisionError):
        put_rows(sent.of(), computed())
    assert len(sent.records) == 1, "a large output is not held as a whole"


def test_a_repeat_has_the_names_of_the_first_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, members of groups deliver each batch again that Spark repeats; or skip what no repeat is."""
    batches = [rows([event(1)]), rows([]), rows([event(1)])]
    first, again, others = Sent(), Sent(), Sent()
    put_rows(first.of(), batches)
    monkeypatch.setattr(puts, "HELD_BYTES", 1)
    put_rows(again.of(), batches)
    assert first.names == again.names
    put_rows(others.of(batch=4), batches)
    put_rows(others.of(task=3), batches)
    assert len({*first.names, *others.names}) == 6


def test_rows_are_put_in_order_or_by_their_time() -> None:
    """If this fails, the windows of an aggregate come out in the order of its shuffle, or events of a key change places."""
    mixed = [event(number) for number in (3, 1, 2, 1)]
    for by_time in (False, True):
        sent = Sent()
        batches = [rows(mixed[:2]), rows(mixed[2:])]
        assert put_rows(sent.of(), batches, by_time=by_time) == 4
        assert sent.records == (sorted(mixed, key=lambda record: record.timestamp) if by_time else mixed)
        assert sent.turns == {7}


def test_a_task_tells_what_it_put(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a task puts other records than it was given, or too few."""
    sent = Sent()
    monkeypatch.setattr(puts, "connection", lambda _url: sent)
    records = [event(n, ("x", b"y")) for n in range(501)]
    whole = rows(records)
    slices = [whole.slice(100, 401), whole.slice(0, 100), rows([])]
    counted = metrics.BROKER_PARTITION_BYTES.labels("t", "1")._value
    (told,) = put_task("kinesis://x", "t", "w", 5, slices)
    assert sent.records == records[100:] + records[:100]
    (row,) = told.to_pylist()
    assert row["events"] == 501
    assert sent.turns == {5}
    before = counted.get()
    add_counters(row["counters"])
    assert counted.get() == before + 14, "two pieces were put"
