"""What a dead letter carries, and what a redrive gives back."""

import pytest

from services.core.broker.record import Record, TopicPartition
from services.core.undelivered.dead_letter import PREFIX, DeadLetter, Position, event_time, make_dead_letter, strip

_EVENT = Record(b"k", b'{"n":1}', 1_600_000_000_000, (("ce_id", b"e1"),))
_NOW = 1_700_000_000_000


def _letter(event: Record) -> Record:
    return make_dead_letter(
        event,
        reason="http_404",
        detail="no",
        node="expel",
        pipe="late",
        first_failure=_NOW,
        source=TopicPartition("orders", 1),
        offset=7,
        now_ms=_NOW,
    )


def test_a_letter_is_as_old_as_its_writing() -> None:
    """If it fails, Kafka deletes the letter of an event that waited long at once: it counts retention from the timestamp."""
    letter = _letter(_EVENT)
    assert letter.timestamp == _NOW
    assert event_time(letter) == _EVENT.timestamp
    assert strip(letter) == _EVENT
    assert DeadLetter.of(Position("late.dead", 0, 3), letter).as_json()["event_time"] == "2020-09-13T12:26:40.000Z"


def test_a_letter_of_a_letter_keeps_the_event_time() -> None:
    """If it fails, an event that is given up twice comes back with the time of its first letter."""
    assert strip(_letter(strip(_letter(_EVENT)))) == _EVENT


@pytest.mark.parametrize("time", [b"", b"x", b"9" * 16, "\u0661".encode()])
def test_letters_of_before_and_of_others_say_the_event_time_themselves(time: bytes) -> None:
    """If it fails, letters that an older version wrote are redriven with another time, or stop the command."""
    letter = Record(b"k", b"{}", 5, ((PREFIX + "reason", b"x"), (PREFIX + "time", time)))
    assert strip(letter) == Record(b"k", b"{}", 5)
    assert strip(Record(b"k", b"{}", 5, ((PREFIX + "reason", b"x"),))) == Record(b"k", b"{}", 5)
