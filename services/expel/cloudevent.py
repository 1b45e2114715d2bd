"""Records as CloudEvents 1.0 in JSON, built from bytes around the untouched payload."""

import base64
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import lru_cache

import orjson

from services.core import event
from services.core.broker.record import Record
from services.core.event import ARRIVAL, CONTENT_TYPE, ID
from services.expel.body import (
    BadRecord,
    BodyFormat,
    PlainRenderer,
    checked,
    is_json_type,
    join_array,
    join_lines,
)
from services.expel.json_check import are_json

_PLAIN = bytes(code for code in range(0x20, 0x7F) if code not in b'"\\')
"""Bytes that need no escape in a JSON string."""
_MILLIS = [b".%03dZ" % n for n in range(1000)]
_NOT_FROM_HEADERS = frozenset({"data", "data_base64", "datacontenttype"})


def make_format(body: str, pipe: str) -> BodyFormat:
    """`cloudevents`, `json` or `ndjson`."""
    if body == "cloudevents":
        content_type = "application/cloudevents-batch+json"
        return BodyFormat(content_type, lambda topic: CloudEventRenderer(pipe, topic), join_array)
    if body == "json":
        return BodyFormat("application/json", lambda _topic: PlainRenderer(on_lines=False), join_array)
    return BodyFormat("application/x-ndjson", lambda _topic: PlainRenderer(on_lines=True), join_lines)


class CloudEventRenderer:
    """source and type, where the client gave none, say which pipe and stream the event came through."""

    def __init__(self, pipe: str, topic: str) -> None:
        self._source, self._type = f"penstock/{pipe}", f"penstock.{topic}"
        middle = f'","source":"{self._source}","type":"{self._type}","time":"'
        self._template = b'{"specversion":"1.0","id":"%b' + middle.encode() + b'%b%b","penstockarrival":"%b","data":%b}'

    def usual_parts(
        self, records: Sequence[Record], ids: Sequence[bytes], arrivals: Sequence[bytes]
    ) -> Sequence[bytes] | None:
        """As in Renderer."""
        values = [record.value for record in records]
        if b"".join(ids).translate(None, _PLAIN) or not are_json(values):
            return None
        stamps = [record.timestamp for record in records]
        seconds = [_second(stamp // 1000) for stamp in stamps]
        if not all(seconds):
            return None
        template, millis = self._template, _MILLIS
        return [
            template % (event_id, second, millis[stamp % 1000], arrival, value)
            for event_id, second, stamp, arrival, value in zip(ids, seconds, stamps, arrivals, values, strict=True)
        ]

    def part(self, record: Record, headers: dict[str, bytes], event_id: bytes) -> bytes:
        """As in Renderer."""
        attributes = {"specversion": "1.0", "id": "", "source": self._source, "type": self._type}
        if second := _second(record.timestamp // 1000):
            attributes["time"] = (second + _MILLIS[record.timestamp % 1000]).decode()
        attributes.update(_attributes(headers))
        if (trace := event.read_traceparent(record)) is not None:
            attributes[event.TRACEPARENT] = trace
        if attributes["specversion"] != "1.0":
            raise BadRecord("its CloudEvents version is not 1.0")
        content_type = headers.get(CONTENT_TYPE)
        if content_type is not None:
            attributes["datacontenttype"] = content_type.decode(errors="replace")
        head = orjson.dumps(attributes)[:-1]
        if is_json_type(content_type):
            return b'%b,"data":%b}' % (head, checked(record.value))
        if record.value is None:
            raise BadRecord("the value is null")
        return b'%b,"data_base64":"%b"}' % (head, base64.b64encode(record.value))


def _attributes(headers: dict[str, bytes]) -> dict[str, str]:
    """The CloudEvents attributes that the record carries; those of the payload are ours to say."""
    found = {
        name: value
        for name, value in event.attributes(tuple(headers.items())).items()
        if name not in _NOT_FROM_HEADERS and _is_attribute(name)
    }
    if "id" not in found:
        raise BadRecord(f"the header {ID} is not UTF-8")
    arrival = headers.get(ARRIVAL, b"")
    if arrival.isdigit():
        found["penstockarrival"] = arrival.decode()
    return found


def _is_attribute(name: str) -> bool:
    """CloudEvents attribute names: lower-case ASCII letters and digits."""
    return name.isascii() and name.isalnum() and name == name.lower()


@lru_cache(maxsize=4096)
def _second(second: int) -> bytes:
    """RFC 3339 without fraction and zone; empty for a time outside the calendar (only others write those)."""
    try:
        return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S").encode().rjust(19, b"0")
    except (ValueError, OverflowError, OSError):
        return b""
