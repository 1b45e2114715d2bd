"""Which reader takes a request's body, by its Content-Type."""

import enum
from email.message import Message
from functools import lru_cache

from aiohttp import hdrs
from aiohttp.http import RawRequestMessage

from services.ingest import cloudevents, json_events, problems
from services.ingest.items import Items, Limits
from services.ingest.problems import Refused


class Format(enum.Enum):
    """What a body is, as far as its Content-Type says."""

    JSON = enum.auto()
    LINES = enum.auto()
    CLOUDEVENT = enum.auto()
    CLOUDEVENTS_BATCH = enum.auto()


MAX_MEDIA_TYPE = 256

MEDIA_TYPES = {
    "application/json": Format.JSON,
    "application/x-ndjson": Format.LINES,
    "application/jsonl": Format.LINES,
    "application/cloudevents+json": Format.CLOUDEVENT,
    "application/cloudevents-batch+json": Format.CLOUDEVENTS_BATCH,
}
_READERS = {
    Format.JSON: json_events.read_json,
    Format.LINES: json_events.read_lines,
    Format.CLOUDEVENT: cloudevents.read_structured,
    Format.CLOUDEVENTS_BATCH: cloudevents.read_batch,
}


@lru_cache(maxsize=256)
def find_format(content_type: str) -> Format | None:
    """The format of a Content-Type; None when it is none of ours or not in UTF-8."""
    if (
        len(content_type) > MAX_MEDIA_TYPE or not content_type.isascii()
    ):  # the parser takes quadratic time, and ASCII only
        return None
    header = Message()
    header["Content-Type"] = content_type
    charset = header.get_param("charset", "utf-8")
    if not isinstance(charset, str) or charset.lower() not in ("utf-8", "utf8", "us-ascii"):
        return None
    return MEDIA_TYPES.get(content_type.partition(";")[0].strip().lower())


def check_format(message: RawRequestMessage) -> tuple[str, Format | None]:
    """The Content-Type and its format; None for a CloudEvent in binary mode. Raises Refused for what is neither."""
    content_type = message.headers.get(hdrs.CONTENT_TYPE, "")
    chosen = find_format(content_type)
    if chosen in (Format.CLOUDEVENT, Format.CLOUDEVENTS_BATCH):
        return content_type, chosen
    if "ce-specversion" in message.headers:
        return content_type, None
    if chosen is None:
        known = ", ".join(MEDIA_TYPES)
        raise Refused(problems.UNSUPPORTED_MEDIA_TYPE, f"One of {known}, in UTF-8, is supported; or ce- headers.")
    return content_type, chosen


def read_items(
    body: bytes, content_type: str, chosen: Format | None, message: RawRequestMessage, limits: Limits
) -> Items:
    """The events in a body. Raises Refused when it cannot be used as a whole."""
    if chosen is None:
        return cloudevents.read_binary(body, message.headers.items(), content_type, limits)
    return _READERS[chosen](body, limits)
