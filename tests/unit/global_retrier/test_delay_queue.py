"""What is read ahead of a partition is little, in order, and says what it is."""

from collections.abc import Sequence

from services.core.broker.contract import MAX_POLL_BYTES
from services.core.broker.record import Batch, Damage, Record, TopicPartition
from services.core.pipe_file.topic_names import RETRY_IN, delay_topic
from services.global_retrier.delay_queue import MAX_BYTES, MAX_EVENTS, MOVE_EVENTS, DelayQueue
from tests.unit.global_retrier.river import make_record, make_state

NOW = 1_800_000_000_000
SOURCE = TopicPartition(delay_topic(4), 0)


def filled(records: Sequence[Record], source: TopicPartition = SOURCE) -> DelayQueue:
    queue = DelayQueue(source)
    if records:
        queue.add(Batch(*source, range(10, 10 + len(records)), list(records)), NOW)
    return queue


def test_first_in_first_out_at_its_time() -> None:
    """Broken: records overtake each other, so that a crash repeats many, or one leaves before its delay is over."""
    queue = filled([make_record(make_state(NOW + 60_000), NOW + n) for n in range(-3, 3)])
    assert queue.pop_ready(NOW + 3996) == []
    assert [item.offset for item in queue.pop_ready(NOW + 3998)] == [10, 11]
    assert [item.offset for item in queue.pop_ready(NOW + 60_000)] == [12, 13, 14, 15]
    assert (len(queue), queue.first_due()) == (0, None)


def test_what_is_due_in_its_topic_leaves_then() -> None:
    """Broken: an event is up to a whole delay late."""
    queue = filled([make_record(make_state(NOW + 700), NOW)])
    assert queue.pop_ready(NOW + 699) == []
    assert [item.due for item in queue.pop_ready(NOW + 700)] == [NOW + 700]


def test_nothing_waits_in_retry_in() -> None:
    """Broken: what is handed over is not on its way at once."""
    queue = filled([make_record(make_state(NOW + 5000), NOW)], TopicPartition(RETRY_IN, 0))
    assert len(queue.pop_ready(NOW)) == 1


def test_bounds_in_events_and_bytes() -> None:
    """Broken: a million waiting events, or a few large ones, fill the memory; or one crash repeats thousands."""
    queue = filled([make_record(make_state(NOW), NOW)] * MAX_EVENTS)
    assert (queue.is_full, queue.has_room) == (True, False)
    assert len(queue.pop_ready(NOW)) == MOVE_EVENTS
    assert (queue.is_full, queue.has_room) == (False, False)
    queue.pop_ready(NOW)
    assert (queue.is_full, queue.has_room) == (False, True)
    large = filled([make_record(make_state(NOW), NOW, b"x" * 600_000)] * (MAX_POLL_BYTES // 600_000))
    assert large.is_full
    assert len(large.pop_ready(NOW)) == 1
    huge = filled([make_record(make_state(NOW), NOW, b"x" * (MAX_BYTES + 1))] * 2)
    assert len(huge.pop_ready(NOW)) == 1


def test_what_is_no_retry_record_goes_at_once() -> None:
    """Broken: foreign or damaged records block the queue, or are dropped without a word."""
    foreign = filled([Record(None, b"x", NOW)])
    (item,) = foreign.pop_ready(NOW)
    assert (item.problem, "penstock_retry_pipe" in item.detail) == ("bad_retry_record", True)
    queue = DelayQueue(SOURCE)
    queue.add(Batch(*SOURCE, [9], [Record(None, b"?", NOW)], Damage(4, 9, "checksum")), NOW)
    (item,) = queue.pop_ready(NOW)
    assert (item.offset, item.problem, item.detail) == (9, "damaged", "offsets 4 to 9: checksum")
