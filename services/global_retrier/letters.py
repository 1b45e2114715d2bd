"""Dead letters of the retrier: records that it can move nowhere."""

from services.core.broker.record import Record, TopicPartition
from services.core.dead_letter import PREFIX, make_dead_letter
from services.core.ledger.report import Node
from services.core.retry_state import unwrap
from services.global_retrier.line import Waiting

NODE: Node = "retrier"


def make_letter(source: TopicPartition, item: Waiting, now: int) -> Record:
    """The letter: of the event as it was before it was handed over, when it was a retry record; else of the record as it is."""
    if not item.pipe:
        return make_dead_letter(
            item.record,
            reason=item.problem,
            detail=item.detail,
            node=NODE,
            pipe="",
            first_failure=now,
            source=source,
            offset=item.offset,
            now_ms=now,
        )
    original, state = unwrap(item.record)
    origin, offset = state.position()
    return make_dead_letter(
        original,
        reason=item.problem,
        detail=f"{item.detail}; last failure: {state.reason}: {state.detail}",
        node=NODE,
        pipe=state.pipe,
        destination=state.destination,
        attempts=state.attempts,
        first_failure=state.first_failure,
        source=origin,
        offset=offset,
        now_ms=now,
    )


def without_value(letter: Record) -> Record:
    """For a letter that is larger than the broker takes: its headers still say where the whole record lies."""
    return Record(
        None, None, letter.timestamp, tuple(header for header in letter.headers if header[0].startswith(PREFIX))
    )
