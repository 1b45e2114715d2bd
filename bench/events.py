"""The event that all figures are about: a JSON object of 300 bytes with an id, a key and a time."""

import time

import orjson

EVENT_BYTES = 300
_NOW_MS = time.time_ns() // 1_000_000


def make_event(number: int) -> bytes:
    """Event number `number`, exactly EVENT_BYTES long."""
    fields = {
        "id": f"evt-{number:012d}",
        "user": f"user-{number % 5000:06d}",
        "time": _NOW_MS - number,
        "type": "page_view",
        "path": "/products/blue-widget/reviews",
        "referrer": "search",
        "duration_ms": number % 997,
        "price": 12.5,
        "tags": ["spring", "sale"],
        "note": "",
    }
    fields["note"] = "x" * (EVENT_BYTES - len(orjson.dumps(fields)))
    return orjson.dumps(fields)


def make_body(events: int) -> bytes:
    """A request body: one object, or a JSON array of several."""
    rows = [make_event(number) for number in range(events)]
    return rows[0] if events == 1 else b"[" + b",".join(rows) + b"]"
