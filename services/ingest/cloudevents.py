"""CloudEvents 1.0 over HTTP: batch, structured (JSON) and binary mode.

The payload of a record is the event's data: the bytes of `data` in the body, or the decoded `data_base64`, or `null` without
data. A `data` string whose media type is not JSON is stored as its text. The attributes become headers of the record.
"""

import base64
import binascii
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec
import orjson

from services.ingest import json_events, problems
from services.ingest.event_fields import CONTROL
from services.ingest.json_events import WHITESPACE, Attributes, Items, Limits, check_count, check_single, parse
from services.ingest.problems import Refusal, Refused, kind_of

HEADER_PREFIX = "ce-"
JSON = "application/json"
MAX_ATTRIBUTES = 64
_REQUIRED = ("id", "source", "type")
_TEXTS = frozenset(("datacontenttype", "dataschema", "subject", "time", "partitionkey"))
"""Optional attributes whose values are text."""
_NAME = re.compile(r"[a-z0-9]{1,64}")
NO_DATA = b"null"
"""The payload of an event without data, or with the JSON value null. In a compacted stream such an event is a tombstone: it is
this object, because the text `null` of another media type is data."""


class _Data(msgspec.Struct):
    """The member of an event that is not an attribute."""

    data: msgspec.Raw = msgspec.Raw(NO_DATA)


_DATA = msgspec.json.Decoder(_Data)


class _Fault(Exception):
    """The reason why an event is not a valid CloudEvent. The message is for a person."""


def read_batch(body: bytes, limits: Limits) -> Items:
    """An array of CloudEvents. Raises Refused for the whole body."""
    documents = parse(body)
    if type(documents) is not list:
        raise Refused(problems.BAD_JSON, f"The body is {kind_of(documents)}. Send a JSON array of CloudEvents.")
    check_count(len(documents), limits)
    return read_elements(body, documents, 0, limits)


def read_elements(text: bytes, documents: list[Any], first: int, limits: Limits) -> Items:
    """As `json_events.read_elements`, for CloudEvents."""
    return _unwrap(json_events.read_elements(text, documents, first, limits))


def read_structured(body: bytes, limits: Limits) -> Items:
    """One CloudEvent. Raises Refused."""
    document = parse(body)
    if type(document) is not dict:
        raise Refused(problems.BAD_JSON, f"The body is {kind_of(document)}. Send one CloudEvent, a JSON object.")
    text = body.strip(WHITESPACE)
    check_single(text, document, limits)
    return _unwrap(Items([text], [document], range(1)))


def read_binary(body: bytes, headers: Iterable[tuple[str, str]], content_type: str, limits: Limits) -> Items:
    """One CloudEvent whose attributes are `ce-…` headers and whose data is the body, of any media type."""
    document: dict[str, Any] = {}
    has_data = bool(body)
    if len(body) > limits.event_bytes:
        raise Refused(problems.EVENT_TOO_LARGE, json_events.too_large(len(body), limits))
    if is_json(content_type) and body:
        parsed = parse(body)
        check_single(body, parsed, limits)
        document = parsed if type(parsed) is dict else {}
        has_data = parsed is not None
    try:
        attributes = _attributes(_from_headers(headers, content_type))
    except _Fault as fault:
        return Items([], [], [], [], [Refusal(0, problems.BAD_CLOUDEVENT, str(fault))])
    return Items([body if has_data else NO_DATA], [document], range(1), [attributes])


def _from_headers(headers: Iterable[tuple[str, str]], content_type: str) -> dict[str, Any]:
    """The attributes among the headers; values are percent-encoded UTF-8."""
    members: dict[str, Any] = {}
    for header, value in headers:
        name = header.lower()
        if not name.startswith(HEADER_PREFIX):
            continue
        name = name.removeprefix(HEADER_PREFIX)
        if name in members:
            raise _Fault(f"{_call(name, 'header ce-')} is repeated. Send each attribute once.")
        try:
            members[name] = unquote_to_bytes(value.encode(errors="surrogateescape")).decode()
        except UnicodeDecodeError:
            raise _Fault(f"{_call(name, 'header ce-')} is not percent-encoded UTF-8.") from None
    if content_type:
        members["datacontenttype"] = content_type
    return members


def is_json(content_type: str) -> bool:
    """Whether a media type is JSON. Without a media type the data is JSON."""
    media = content_type.partition(";")[0].strip().lower()
    return media in ("", JSON, "text/json") or media.endswith("+json")


def _unwrap(chosen: Items) -> Items:
    """From CloudEvents to their data and attributes."""
    items = Items([], [], [], [], chosen.refused)
    indexes: list[int] = []
    for text, members, index in zip(chosen.values, chosen.documents, chosen.indexes, strict=True):
        try:
            attributes = _attributes(members)
            value = _value(text, members, attributes.get("datacontenttype", ""))
        except _Fault as fault:
            items.refused.append(Refusal(index, problems.BAD_CLOUDEVENT, str(fault)))
            continue
        data = members.get("data")
        items.values.append(value)
        items.documents.append(data if type(data) is dict else {})
        items.attributes.append(attributes)  # type: ignore[union-attr]  # it is the list made above
        indexes.append(index)
    items.indexes = indexes
    return items


def _value(text: bytes, members: dict[str, Any], content_type: str) -> bytes:
    encoded = members.get("data_base64")
    if encoded is not None:
        if type(encoded) is not str:
            raise _Fault(f"The member data_base64 is {kind_of(encoded)}. Send a string.")
        if members.get("data") is not None:
            raise _Fault("The event has both data and data_base64. Send one of them.")
        try:
            return base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            raise _Fault("The member data_base64 is a string, but not valid Base64.") from None
    data = members.get("data")
    if type(data) is str and not is_json(content_type):
        return data.encode()
    return NO_DATA if data is None else bytes(_DATA.decode(text).data)


def _attributes(members: dict[str, Any]) -> Attributes:
    """All attributes as strings. Raises _Fault when the specification does not allow one."""
    if (version := members.get("specversion")) != "1.0":
        found = "a string, but another version" if type(version) is str else _found(version)
        raise _Fault(f'The attribute specversion is {found}. Send the string "1.0".')
    for name in _REQUIRED:
        if type(members.get(name)) is not str or not members[name]:
            raise _Fault(f"The attribute {name} is {_found(members.get(name))}. Send a string that is not empty.")
    if len(members) > MAX_ATTRIBUTES:
        raise _Fault(f"The event has {len(members)} attributes. An event may have at most {MAX_ATTRIBUTES}.")
    attributes: Attributes = {}
    for name, value in members.items():
        if name in ("data", "data_base64") or value is None:
            continue
        if not _NAME.fullmatch(name):
            wrong = "is empty" if not name else "has characters other than a to z and 0 to 9"
            wrong = f"has {len(name)} characters, and may have at most 64" if len(name) > 64 else wrong
            raise _Fault(f"The name of an attribute {wrong}.")
        attributes[name] = value if type(value) is str else _text(name, value)
        if name != "id" and CONTROL.search(attributes[name]):
            raise _Fault(f"The attribute {name} has control characters. Send it without them.")
    return attributes


def _text(name: str, value: object) -> str:
    if name in _TEXTS:
        raise _Fault(f"The attribute {name} is {kind_of(value)}. Send a string.")
    if type(value) is bool or type(value) is int:
        return orjson.dumps(value).decode()
    raise _Fault(f"The attribute {name} is {kind_of(value)}. Send a string, an integer or a boolean.")


def _found(value: object) -> str:
    return "missing" if value is None else kind_of(value)


def _call(name: str, kind: str) -> str:
    """The attribute's header by its name; without it when the name itself is wrong, because that may be anything."""
    return f"The {kind}{name}" if _NAME.fullmatch(name) else f"A {kind}"
