"""How many partitions a topic had when a group began."""

from services.core.broker.kafka.commit_note import CommitNote
from services.core.broker.kafka.offsets import Committed
from services.core.broker.kafka.placement import count_at_beginning
from services.core.broker.record import TopicPartition

_FOUR = [TopicPartition("t", number) for number in range(4)]


def test_the_smallest_note_counts() -> None:
    """If it fails, a partition that was added later is read from "latest": its first records are skipped."""
    committed = {_FOUR[0]: Committed(5, CommitNote(2)), _FOUR[3]: Committed(0, CommitNote(3))}
    assert count_at_beginning(_FOUR, committed, {}) == {"t": 2}


def test_without_a_note_all_partitions_were_there() -> None:
    """If it fails, a group that an operator moved (or that others wrote) starts where nobody asked for."""
    for note in ("", "partitions=", "partitions=x", "something else"):
        assert count_at_beginning(_FOUR, {_FOUR[0]: Committed(5, CommitNote.parse(note))}, {}) == {"t": 4}
    assert count_at_beginning(_FOUR, {}, {}) == {"t": 4}
