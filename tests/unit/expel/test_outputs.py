"""Destinations of a transform with several outputs: each gets its own, and counts the others."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from services.core.broker.record import Batch, Record, TopicPartition
from services.core.event import OUTPUTS
from services.core.pipe_file.pipes import PipeFile
from services.expel.output_filter import OutputFilter
from services.expel.retry_policy import Outcome
from tests.unit.expel.fake_broker import FakeBroker
from tests.unit.expel.fake_sender import WRONG, make_record
from tests.unit.expel.receiver import wait_until
from tests.unit.expel.running_lane import P0, names, run_lane
from tests.unit.expel.test_takeover import WITH_RETRY_TOPIC, inherited, waiting

PIPE = PipeFile.model_validate(
    {
        "streams": {"s": {}},
        "pipes": {
            "late": {
                "sources": ["s"],
                "transform": {
                    "sql": "SELECT * FROM s",
                    "outputs": {"large": {"where": "n > 1", "renamed_from": "big"}, "small": {"where": "n < 1"}},
                },
                "destinations": [
                    {"name": "hook", "from": "large", "webhook": {"url": "https://example.org/"}},
                    {"name": "rest", "webhook": {"url": "https://example.org/"}},
                ],
            }
        },
    }
).pipes["late"]
LARGE, EVERY = (OutputFilter.of(PIPE, one) for one in PIPE.destinations)


def result(number: int, outputs: str | None) -> Record:
    """A result as the transform writes it. outputs: None: from before it had several."""
    record = make_record(number)
    own = () if outputs is None else ((OUTPUTS, outputs.encode()),)
    return Record(record.key, record.value, record.timestamp, record.headers + own)


@given(st.lists(st.sampled_from([None, "", "large", "small", "small,large", "larger", "big", "gone"])))
def test_each_event_is_chosen_or_counted(outputs: list[str | None]) -> None:
    """Broken: an event is in neither list, so nobody settles it; or a receiver gets events of another output."""
    assert LARGE is not None
    assert EVERY is not None
    if not outputs:
        return
    records = [result(number, names) for number, names in enumerate(outputs)]
    batch = Batch("late.out", 0, range(len(records)), records)
    mine, others = LARGE.choose(batch)
    expected = [n for n, names in enumerate(outputs) if names in (None, "large", "small,large", "big")]
    assert ([] if mine is None else list(mine.offsets)) == expected
    assert ([] if mine is None else list(mine.records)) == [make_record(number) for number in expected]
    assert ([] if others is None else list(others.offsets)) == [n for n in range(len(outputs)) if n not in expected]
    every, none = EVERY.choose(batch)
    assert none is None
    assert every is not None
    assert list(every.records) == [make_record(number) for number in range(len(outputs))]


def filtered() -> float:
    labels = {"pipe": "late", "destination": "hook"}
    return REGISTRY.get_sample_value("penstock_expel_events_filtered_total", labels) or 0.0


@pytest.mark.parametrize("answer", [None, WRONG])
async def test_events_of_other_outputs_are_settled_and_not_sent(answer: Outcome) -> None:
    """Broken: they hold up the destination's position, or are sent to it, or are dead letters."""
    before = filtered()
    sent = [result(number, "large" if number % 3 == 0 else "small") for number in range(30)]
    async with run_lane(sent, lambda _: answer, outputs=LARGE) as running:
        await wait_until(lambda: running.committed() == 29)
        tried = {name for request in running.sender.sent for name in request}
        dead = Counter(record.header("ce_id") for record in running.dead_letters())
    assert tried == set(names(range(0, 30, 3)))
    assert len(dead) == (0 if answer is None else 10)
    assert filtered() - before == 20


async def test_the_predecessors_retries_are_recognised_without_the_header() -> None:
    """Broken: after a crash an event of an output is tried again, beside its copy that waits at the retrier."""
    broker = FakeBroker({"s": 1, "late.dead": 1, "late.retry": 1, "penstock.retry-in": 1})
    broker.stored[TopicPartition("penstock.retry-in", 0)] += [waiting(0), waiting(6)]
    before = inherited()
    sent = [result(number, "large" if number % 3 == 0 else "small") for number in range(10)]
    async with run_lane(sent, broker=broker, outputs=LARGE, **WITH_RETRY_TOPIC) as running:  # type: ignore[arg-type]
        await wait_until(lambda: running.committed(P0) == 9)
        assert running.sender.taken == names([3, 9])
    assert inherited() - before == 2


def tombstones() -> float:
    labels = {"pipe": "late", "destination": "hook"}
    return REGISTRY.get_sample_value("penstock_expel_tombstones_total", labels) or 0.0


async def test_tombstones_are_settled_and_not_sent() -> None:
    """Broken: each deleted key becomes a dead letter; or a record that somebody damaged is passed over as if it were one."""
    before = tombstones()
    records = [make_record(number) for number in range(10)]
    gone = {number: Record(b"k", None, 1, records[number].headers) for number in (2, 3, 9)}
    damaged = {5: Record(None, None, 1, records[5].headers)}
    sent = [(gone | damaged).get(number, record) for number, record in enumerate(records)]
    async with run_lane(sent) as running:
        await wait_until(lambda: running.committed() == 9)
        assert set(running.sender.taken) == set(names([0, 1, 4, 6, 7, 8]))
        assert [record.header("ce_id") for record in running.dead_letters()] == [records[5].header("ce_id")]
    assert tombstones() - before == 3
