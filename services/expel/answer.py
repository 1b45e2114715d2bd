"""What a receiver's answer says about single events.

A receiver that took only some events answers 200 or 207 with JSON `{"failed": [item, …]}`, at most MAX_ANSWER bytes, not
compressed. An item names an event by `"id"` (its CloudEvents id) or by `"index"` (its 0-based place in the body); it may add
`"status"` (as if that event had been answered alone), `"retry"` (true or false, instead of judging by the status) and
`"reason"` (text for the dead letter). Events that are not named are delivered. docs/delivery.md says it for receivers.
"""

import msgspec

from services.expel.delivery import Delivery
from services.expel.http_answer import MAX_ANSWER
from services.expel.outcome import Failure, Outcome, is_recoverable

_MAX_EXCERPT = 200
_MAX_REASON = 500

BAD_ANSWER = "bad_answer"
ITEM_FAILED = "item_failed"


class FailedItem(msgspec.Struct):
    """One event that the receiver did not take."""

    id: str | None = None
    index: int | None = None
    status: int | None = None
    retry: bool | None = None
    reason: str | None = None


class PartialAnswer(msgspec.Struct):
    """The answer's body; other members are ignored."""

    failed: list[FailedItem]


_decode = msgspec.json.Decoder(PartialAnswer).decode


def read_outcome(status: int, body: bytes, whole: bool, delivery: Delivery) -> Outcome:
    """What a 2xx with this body means.

    When it may name failed events but cannot be understood, nothing counts as delivered: better twice than never.
    """
    if status != 207 and b'"failed"' not in body:
        return None
    if not whole:
        return _bad(f"an answer that names failed events has at most {MAX_ANSWER} bytes")
    try:
        items = _decode(body).failed
    except (msgspec.DecodeError, RecursionError):
        return _bad('a 207 needs JSON like {"failed": [{"id": "…"}]}') if status == 207 else _judge_odd(body)
    return _by_index(items, delivery)


def _judge_odd(body: bytes) -> Outcome:
    """A 200 whose body has the word but not the shape: `{"failed": 0}` is no refusal, a list that cannot be read is one."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return None  # not JSON: a page or a text that happens to have the word
    named = value.get("failed") if isinstance(value, dict) else None
    return _bad("the list of failed events is not valid") if isinstance(named, list) else None


def _by_index(items: list[FailedItem], delivery: Delivery) -> Outcome:
    places: dict[bytes, list[int]] = {}
    for index, event_id in enumerate(delivery.ids):
        places.setdefault(event_id, []).append(index)
    failures: dict[int, Failure] = {}
    for item in items:
        if item.index is not None:
            found = [item.index] if 0 <= item.index < len(delivery) else []
        else:
            found = places.get((item.id or "").encode(errors="replace"), [])
        if not found:
            return _bad("the answer names an event that was not in the request")
        failures.update(dict.fromkeys(found, _fail_item(item)))
    return failures or None


def _fail_item(item: FailedItem) -> Failure:
    recoverable = item.retry if item.retry is not None else item.status is None or is_recoverable(item.status)
    reason = ITEM_FAILED if item.status is None or not 100 <= item.status <= 599 else f"http_{item.status}"
    detail = "the receiver refused this event" + (f": {_printable(item.reason[:_MAX_REASON])}" if item.reason else "")
    return Failure(reason, detail, recoverable)


def _bad(detail: str) -> Failure:
    return Failure(BAD_ANSWER, detail, recoverable=True)


def excerpt(body: bytes) -> str:
    """The beginning of an answer, for a person: printable, on one line."""
    return _printable(body[:_MAX_EXCERPT].decode(errors="replace"))


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text).strip()
