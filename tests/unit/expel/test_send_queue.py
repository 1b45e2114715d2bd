"""Cutting requests: broken, events are lost between the queue and a request, sent twice, or out of order."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.broker.record import Record, TopicPartition
from services.expel.delivery import Delivery, OffsetRun
from services.expel.send_queue import SEPARATOR, KeyedEvents, NewEvents, RequestLimits, UnorderedEvents

KEYS = st.sampled_from([None, b"a", b"b", b"c"])
EVENTS = st.lists(st.tuples(KEYS, st.integers(1, 30)), min_size=1, max_size=40)


def make_polled(first: int, events: Sequence[tuple[bytes | None, int]], partition: int = 0) -> Delivery:
    parts = [b"x" * size for _, size in events]
    offsets = range(first, first + len(events))
    return Delivery(
        parts,
        [b"%d" % offset for offset in offsets],
        [0] * len(events),
        [Record(key, b"", 0) for key, _ in events],
        [OffsetRun(TopicPartition("s", partition), offsets, 0)],
        sum(map(len, parts)),
        sum(map(len, parts)) + 10.0 * len(parts),
        float(first),
    )


def numbers(delivery: Delivery) -> list[int]:
    return [int(event_id) for event_id in delivery.ids]


def check(delivery: Delivery, limits: RequestLimits) -> None:
    """A delivery's lists belong together and its size is within the limits."""
    assert 1 <= len(delivery) <= limits.max_events
    assert [offset for _, offset, _ in delivery.positions()] == numbers(delivery)
    assert delivery.size == sum(map(len, delivery.parts))
    assert len(delivery) == 1 or delivery.size + len(delivery) * SEPARATOR <= limits.max_bytes


@given(chunks=st.lists(EVENTS, min_size=1, max_size=5), max_events=st.integers(1, 20), max_bytes=st.integers(5, 200))
def test_fifo_cuts_everything_once_in_order(
    chunks: list[list[tuple[bytes | None, int]]], max_events: int, max_bytes: int
) -> None:
    """Broken: slicing across chunks loses or doubles events, or a request is larger than the receiver takes."""
    limits = RequestLimits(max_events, max_bytes)
    pending = UnorderedEvents(limits)
    total = 0
    for events in chunks:
        pending.add(make_polled(total, events, partition=total % 2))
        total += len(events)
    found: list[int] = []
    size = weight = 0.0
    while pending.oldest() is not None:
        delivery = pending.cut()
        check(delivery, limits)
        found += numbers(delivery)
        size, weight = size + delivery.size, weight + delivery.weight
    assert found == list(range(total))
    assert weight == pytest.approx(size + total * 10.0)
    assert not pending.has_full()


@given(
    chunks=st.lists(EVENTS, min_size=1, max_size=4),
    max_events=st.integers(1, 20),
    max_bytes=st.integers(5, 200),
    finish_first=st.lists(st.booleans(), min_size=100, max_size=100),
)
def test_keyed_never_has_two_requests_of_a_key(
    chunks: list[list[tuple[bytes | None, int]]], max_events: int, max_bytes: int, finish_first: list[bool]
) -> None:
    """Broken: a later event of a key overtakes an earlier one that waits for its retry; or an event is lost or doubled."""
    limits = RequestLimits(max_events, max_bytes)
    pending: NewEvents = KeyedEvents(limits)
    total = 0
    keys: list[bytes | None] = []
    for events in chunks:
        pending.add(make_polled(total, events))
        keys += [key for key, _ in events]
        total += len(events)
    sent: list[int] = []
    under_way: list[Delivery] = []
    turn = 0
    while pending.oldest() is not None or under_way:
        if pending.oldest() is not None and (not under_way or not finish_first[turn % 100]):
            delivery = pending.cut()
            check(delivery, limits)
            busy = {keys[n] for other in under_way for n in numbers(other)} - {None}
            assert not busy & {keys[n] for n in numbers(delivery)}
            sent += numbers(delivery)
            under_way.append(delivery)
        else:
            pending.finish(under_way.pop(0).records)
        turn += 1
    assert sorted(sent) == list(range(total))
    for key in (b"a", b"b", b"c"):
        mine = [n for n in sent if keys[n] == key]
        assert mine == sorted(mine)


@pytest.mark.parametrize("kind", [UnorderedEvents, KeyedEvents])
def test_dropped_partitions_leave_nothing_behind(kind: type[UnorderedEvents] | type[KeyedEvents]) -> None:
    """Broken: events of a revoked partition are delivered by two members, or the lane's bounds leak with each rebalance."""
    pending = kind(RequestLimits(3, 1000))
    pending.add(make_polled(0, [(b"a", 1)] * 5, partition=0))
    pending.add(make_polled(5, [(b"b", 2)] * 5, partition=1))
    pending.add(make_polled(10, [(b"a", 3)] * 5, partition=0))
    assert len(pending.cut()) == 3
    events, weight = pending.drop([TopicPartition("s", 0)])
    assert (events, round(weight)) == (7, 2 * 1 + 5 * 3 + 7 * 10)
    found: list[int] = []
    while pending.oldest() is not None:
        delivery = pending.cut()
        found += numbers(delivery)
        pending.finish(delivery.records)
    assert found == [5, 6, 7, 8, 9]


def test_full_counts_only_what_may_go() -> None:
    """Broken: requests of a keyed lane leave half empty at once, or wait for events that may not go."""
    pending = KeyedEvents(RequestLimits(4, 1000))
    pending.add(make_polled(0, [(b"a", 1)] * 4))
    assert pending.has_full()
    first = pending.cut()
    pending.add(make_polled(4, [(b"a", 1)] * 4))
    assert not pending.has_full()
    assert pending.oldest() is None
    pending.finish(first.records)
    assert pending.has_full()
    assert pending.oldest() == 4.0
