"""The low-water mark: a wrong one either loses events (too high) or sends thousands again (too low)."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from services.core.broker.offset_tracker import OffsetTracker
from services.core.broker.record import Batch, Record, TopicPartition

SOURCE = TopicPartition("s", 0)


def make_batch(offsets: list[int]) -> Batch:
    return Batch("s", 0, offsets, [Record(None, b"{}", 0)] * len(offsets))


@st.composite
def batches_and_settling(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Batches of increasing, not contiguous offsets, and the order in which some of them are settled."""
    offsets = sorted(draw(st.sets(st.integers(0, 10_000), min_size=1, max_size=60)))
    batches, rest = [], offsets
    while rest:
        size = draw(st.integers(1, len(rest)))
        batches.append(rest[:size])
        rest = rest[size:]
    order = draw(st.permutations(offsets))
    return batches, order[: draw(st.integers(0, len(order)))]


@given(batches_and_settling())
def test_mark_is_the_end_of_the_settled_prefix(case: tuple[list[list[int]], list[int]]) -> None:
    """Broken: an unfinished event is committed and lost in the next crash, or settled ones are sent again."""
    batches, settled = case
    tracker = OffsetTracker()
    for offsets in batches:
        tracker.add(make_batch(offsets))
    for offset in settled:
        tracker.settle(SOURCE, [offset])
    everything = [offset for offsets in batches for offset in offsets]
    expected = None
    for offset in everything:
        if offset not in settled:
            break
        expected = offset
    assert tracker.committable() == ({} if expected is None else {SOURCE: expected})
    assert tracker.in_flight(SOURCE) == tracker.in_flight() == len(everything) - len(settled)


def test_nothing_is_committed_twice() -> None:
    """Broken: each commit cycle writes the same offsets to the broker again."""
    tracker = OffsetTracker()
    tracker.add(make_batch([1, 2]))
    tracker.settle(SOURCE, [1, 2])
    tracker.record_commit(tracker.committable())
    assert tracker.committable() == {}


def test_forgotten_partition_is_not_committed() -> None:
    """Broken: after a rebalance the old owner moves the new owner's offsets."""
    tracker = OffsetTracker()
    tracker.add(make_batch([1, 2]))
    tracker.remove([SOURCE])
    tracker.settle(SOURCE, [1, 2])
    assert tracker.committable() == {}
    assert tracker.in_flight() == 0


def test_marks_do_not_outlive_their_ownership() -> None:
    """Broken: a topic is deleted and made anew while a commit waits, and the commit passes over the new records."""
    tracker = OffsetTracker()
    tracker.add(make_batch([1, 2]))
    tracker.settle(SOURCE, [1, 2])
    before = tracker.committable()
    tracker.remove([SOURCE])
    tracker.add(make_batch([1, 2]))
    assert tracker.still_owned(before) == {}
    tracker.settle(SOURCE, [1])
    tracker.record_commit(before)
    assert tracker.committable() == {SOURCE: 1}
    tracker.settle(SOURCE, [2])
    tracker.record_commit(before)
    assert tracker.committable() == {SOURCE: 2}, "the commit of an earlier ownership hid this one's"


def test_refused_marks_are_not_committed() -> None:
    """Broken: what the broker refused is never committed again."""
    tracker = OffsetTracker()
    tracker.add(make_batch([1, 2]))
    tracker.settle(SOURCE, [1, 2])
    tracker.record_commit(tracker.committable(), refused={SOURCE})
    assert tracker.committable() == {SOURCE: 2}


@given(batches_and_settling(), st.randoms(use_true_random=False))
def test_settled_records_count_until_their_commit(case: tuple[list[list[int]], list[int]], chance: Random) -> None:
    """Broken: a lane does not know how many delivered events a crash would send again, and delivers without end."""
    batches, settled = case
    tracker, other = OffsetTracker(), TopicPartition("s", 1)
    everything = [offset for offsets in batches for offset in offsets]
    for offsets in batches:
        tracker.add(make_batch(offsets))
    tracker.add(Batch("s", 1, [7, 8], [Record(None, b"", 0)] * 2))
    tracker.settle(other, [7])
    committed = -1
    for offset in settled:
        marks = tracker.committable()
        tracker.settle(SOURCE, [offset])
        if chance.random() < 0.5:
            tracker.record_commit(marks, refused=[other])
            committed = marks.get(SOURCE, committed)
        mark = tracker.committable().get(SOURCE, committed)
        assert tracker.uncommitted() == 1 + sum(committed < one <= mark for one in everything)
    tracker.remove([SOURCE])
    assert tracker.uncommitted() == 1
    tracker.remove([other])
    assert tracker.uncommitted() == 0
