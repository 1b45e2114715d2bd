"""What a request's body holds, as columns: one list per property, a row per event. Every body format ends here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from services.ingest.problems import Refusal

Attributes = dict[str, str]
"""CloudEvents attributes of one event by name, `data` not among them."""


class Items(msgspec.Struct):
    """The events that a body holds, well-formed ones only.

    values: payloads, byte for byte as the client sent them. documents: the same parsed, {} where the payload is no JSON object.
    indexes: where each stood in the request. attributes: per event, None unless the request is CloudEvents.
    refused: events that are not among these columns because they are not well-formed. by_line: NDJSON, where a malformed event
    is its line's fault alone.
    """

    values: list[bytes]
    documents: list[dict[str, Any]]
    indexes: Sequence[int]
    attributes: list[Attributes] | None = None
    refused: list[Refusal] = []
    by_line: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """events: in one request. event_bytes: one event's text as it stands in the body. body_bytes: before and after unpacking."""

    events: int
    event_bytes: int
    body_bytes: int
