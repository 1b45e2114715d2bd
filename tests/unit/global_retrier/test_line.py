"""What is read ahead of a partition is little, in order, and says what it is."""

from collections.abc import Sequence

from services.core.broker.contract import MAX_POLL_BYTES
from services.core.broker.record import Batch, Damage, Record, TopicPartition
from services.core.pipes import RETRY_IN, delay_topic
from services.global_retrier.line import MAX_BYTES, MAX_EVENTS, MOVE_EVENTS, Line
from tests.unit.global_retrier.river import make_record, make_state

NOW = 1_800_000_000_000
SOURCE = TopicPartition(delay_topic(4), 0)


def filled(records: Sequence[Record], source: TopicPartition = SOURCE) -> Line:
    line = Line(source)
    if records:
        line.take(Batch(*source, range(10, 10 + len(records)), list(records)), NOW)
    return line


def test_first_in_first_out_at_its_time() -> None:
    """Broken: records overtake each other, so that a crash repeats many, or one leaves before its delay is over."""
    line = filled([make_record(make_state(NOW + 60_000), NOW + n) for n in range(-3, 3)])
    assert line.cut(NOW + 3996) == []
    assert [item.offset for item in line.cut(NOW + 3998)] == [10, 11]
    assert [item.offset for item in line.cut(NOW + 60_000)] == [12, 13, 14, 15]
    assert (len(line), line.first_due()) == (0, None)


def test_what_is_due_in_its_topic_leaves_then() -> None:
    """Broken: an event is up to a whole delay late."""
    line = filled([make_record(make_state(NOW + 700), NOW)])
    assert line.cut(NOW + 699) == []
    assert [item.due for item in line.cut(NOW + 700)] == [NOW + 700]


def test_nothing_waits_in_retry_in() -> None:
    """Broken: what is handed over is not on its way at once."""
    line = filled([make_record(make_state(NOW + 5000), NOW)], TopicPartition(RETRY_IN, 0))
    assert len(line.cut(NOW)) == 1


def test_bounds_in_events_and_bytes() -> None:
    """Broken: a million waiting events, or a few large ones, fill the memory; or one crash repeats thousands."""
    line = filled([make_record(make_state(NOW), NOW)] * MAX_EVENTS)
    assert (line.is_full, line.has_room) == (True, False)
    assert len(line.cut(NOW)) == MOVE_EVENTS
    assert (line.is_full, line.has_room) == (False, False)
    line.cut(NOW)
    assert (line.is_full, line.has_room) == (False, True)
    large = filled([make_record(make_state(NOW), NOW, b"x" * 600_000)] * (MAX_POLL_BYTES // 600_000))
    assert large.is_full
    assert len(large.cut(NOW)) == 1
    huge = filled([make_record(make_state(NOW), NOW, b"x" * (MAX_BYTES + 1))] * 2)
    assert len(huge.cut(NOW)) == 1


def test_what_is_no_retry_record_goes_at_once() -> None:
    """Broken: foreign or damaged records block the line, or are dropped without a word."""
    foreign = filled([Record(None, b"x", NOW)])
    (item,) = foreign.cut(NOW)
    assert (item.problem, "penstock_retry_pipe" in item.detail) == ("bad_retry_record", True)
    line = Line(SOURCE)
    line.take(Batch(*SOURCE, [9], [Record(None, b"?", NOW)], Damage(4, 9, "checksum")), NOW)
    (item,) = line.cut(NOW)
    assert (item.offset, item.problem, item.detail) == (9, "damaged", "offsets 4 to 9: checksum")
