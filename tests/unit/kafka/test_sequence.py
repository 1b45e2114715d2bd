"""Numbering of batches per partition, and what one append adds up to."""

import pytest

from services.core.broker.contract import Appended
from services.core.broker.errors import BrokerError, OutcomeUnknown, RecordTooLarge, Unavailable
from services.core.broker.kafka.appender import Progress, SequenceState
from services.core.broker.kafka.record_batch import Identity
from tests.contract.traffic import numbered


def test_a_number_is_used_up_only_by_what_was_stored() -> None:
    """If it fails, the broker sees a gap (and refuses everything) or takes a new batch for an old one (and drops it)."""
    state = SequenceState(Identity(1, 0))
    assert state.is_free
    state.doubtful = numbered(range(3))
    assert (state.next, state.is_free) == (0, False)
    state.stored(3)
    assert (state.next, state.is_free) == (3, True)


def test_numbers_wrap_as_kafka_wraps_them() -> None:
    """If it fails, a partition stops after two thousand million events."""
    state = SequenceState(Identity(1, 0), next=0x7FFFFFFF)
    state.stored(2)
    assert state.next == 1


def test_only_the_very_same_records_repeat_a_doubtful_batch() -> None:
    """If it fails, other records go out under the number of a batch that was stored: the broker drops them as known."""
    state = SequenceState(Identity(1, 0))
    first, equal = numbered(range(3)), numbered(range(3))
    assert state.repeated_from(first) is None, "nothing is in doubt"
    state.doubtful = first
    assert state.repeated_from(first) == 0
    assert state.repeated_from([*first, *numbered(range(3, 5))]) == 0
    assert state.repeated_from([*first[1:], *numbered(range(3, 5))]) == 1
    assert state.repeated_from(first[:2]) is None
    assert state.repeated_from(first[1:2]) is None
    assert state.repeated_from([]) is None
    assert state.repeated_from(equal) is None, "equal values are not the same events"
    assert state.in_doubt(first[1:]) == 2
    assert state.in_doubt(equal) == 0


def test_everything_stored() -> None:
    """If it fails, answers name wrong offsets."""
    progress = Progress(numbered(range(5)))
    progress.store(3, 100)
    progress.store(5, 107)
    assert progress.appended() == Appended(100, 108)


def test_what_comes_after_an_unknown_batch_was_not_tried() -> None:
    """If it fails, a client is told "unknown" of events that never left, or "not stored" of some that did."""
    progress = Progress(numbered(range(6)))
    progress.store(2, 10)
    progress.in_doubt = 2
    progress.fail(OutcomeUnknown("time-out"))
    appended = progress.appended()
    assert (appended.first, appended.last) == (10, 11)
    assert [(index, type(error)) for index, error in appended.failed] == [
        (2, OutcomeUnknown),
        (3, OutcomeUnknown),
        (4, Unavailable),
        (5, Unavailable),
    ]


def test_what_was_in_doubt_stays_so_whatever_fails_later() -> None:
    """If it fails, "not stored" is said of records that an earlier attempt may have stored."""
    progress = Progress(numbered(range(4)), in_doubt=2)
    progress.fail(BrokerError("not authorized"))
    kinds: list[type[Exception]] = [type(error) for _, error in progress.appended().failed]
    assert kinds == [OutcomeUnknown, OutcomeUnknown, BrokerError, BrokerError]
    settled = Progress(numbered(range(4)), in_doubt=2)
    settled.store(2, 10)
    settled.fail(Unavailable("away"))
    kinds = [type(error) for _, error in settled.appended().failed]
    assert kinds == [Unavailable, Unavailable]


@pytest.mark.parametrize(("in_doubt", "kind"), [(0, Unavailable), (3, OutcomeUnknown)])
def test_time_out_says_what_is_true(in_doubt: int, kind: type[BrokerError]) -> None:
    """If it fails, an answer after a time-out lies about whether the events may be there."""
    progress = Progress(numbered(range(3)))
    progress.in_doubt = in_doubt
    progress.time_out("late")
    with pytest.raises(kind):
        progress.appended()


def test_mixed_reasons_are_answered_one_by_one() -> None:
    """If it fails, one record's reason is given for all."""
    progress = Progress(numbered(range(2)))
    progress.refuse(0, RecordTooLarge("too large"))
    progress.fail(Unavailable("away"))
    assert [type(error) for _, error in progress.appended().failed] == [RecordTooLarge, Unavailable]
