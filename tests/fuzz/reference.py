"""What an accepted body holds, read by other means than ingest's: the standard library's JSON and gzip, and plain rules.

It is more lenient than ingest. It is asked only about what ingest accepted, and says which payloads must now be stored.
"""

import base64
import gzip
import io
import json
from collections.abc import Iterator, Sequence

import zstandard

from tests.fuzz.corpus import BATCH, EVENT, JSON

_WHITESPACE = " \t\r\n"
_scan = json.JSONDecoder().raw_decode


def stored_values(body: bytes, encoding: str, media: str, *, binary: bool, refused: set[int]) -> list[bytes]:
    """The payloads of the events that were not refused, in order. Raises ValueError where nothing should have been accepted."""
    plain = unpack(body, encoding)
    kind = media.partition(";")[0].strip().lower()
    if binary and kind not in (EVENT, BATCH):
        return [plain or b"null"]
    if kind not in (JSON, EVENT, BATCH):
        lines = enumerate(line.strip(_WHITESPACE.encode()) for line in plain.split(b"\n"))
        return [_checked(line.decode()) for number, line in lines if line and number not in refused]
    whole = plain.decode().strip(_WHITESPACE)
    read = _checked if kind == JSON else data_of
    events = elements(whole) if whole.startswith("[") else [whole]
    return [read(text) for number, text in enumerate(events) if number not in refused]


def unpack(body: bytes, encoding: str) -> bytes:
    """Without the Content-Encoding."""
    if encoding == "gzip":
        return gzip.decompress(body)
    if encoding == "zstd":
        return zstandard.ZstdDecompressor().stream_reader(io.BytesIO(body)).read()
    return body


def elements(array: str) -> Iterator[str]:
    """The texts of a JSON array's elements."""
    at = _skip(array, 1)
    while array[at] != "]":
        if array[at] == ",":
            at = _skip(array, at + 1)
        _, end = _scan(array, at)
        yield array[at:end]
        at = _skip(array, end)


def members(text: str) -> dict[str, str]:
    """The texts of a JSON object's members by name; of equal names the last."""
    found: dict[str, str] = {}
    at = _skip(text, 1)
    while text[at] != "}":
        if text[at] == ",":
            at = _skip(text, at + 1)
        name, at = _scan(text, at)
        at = _skip(text, _skip(text, at) + 1)
        _, end = _scan(text, at)
        found[name] = text[at:end]
        at = _skip(text, end)
    return found


def data_of(event: str) -> bytes:
    """The payload of a CloudEvent in JSON."""
    parts = members(event)
    encoded = json.loads(parts.get("data_base64", "null"))
    if encoded is not None:
        return base64.b64decode(encoded, validate=True)
    data = parts.get("data", "null")
    media = str(json.loads(parts.get("datacontenttype", '""')) or "").partition(";")[0].strip().lower()
    if data.startswith('"') and media not in ("", JSON, "text/json") and not media.endswith("+json"):
        return str(json.loads(data)).encode()
    return data.encode()


def id_of(value: bytes) -> str | None:
    """The event id in a payload; None when it holds none, or is no JSON object."""
    try:
        document = json.loads(value)
    except ValueError:
        return None
    found = document.get("id") if isinstance(document, dict) else None
    return None if found is None else str(found)


def _checked(text: str) -> bytes:
    if not isinstance(json.loads(text), dict):
        raise ValueError("an event that is no object was accepted")  # noqa: TRY004
    return text.encode()


def _skip(text: Sequence[str], at: int) -> int:
    while text[at] in _WHITESPACE:
        at += 1
    return at
