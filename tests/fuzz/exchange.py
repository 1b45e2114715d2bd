"""Answers read strictly: what is not exactly an answer of ours is a failure, and so is one that does not come in time."""

import asyncio
import re
from typing import Any, NamedTuple

import orjson

from services.ingest import problems
from services.ingest.app import OPENAPI

ANSWER_S = 60.0
"""Far more than an answer takes on a loaded machine; whoever waits so long waits for ever."""
_STATUS = re.compile(rb"HTTP/1\.1 ([1-5]\d\d) [A-Za-z -]+")
_HEADER = re.compile(rb"([A-Za-z-]+): ([ -~]+)")
_EVENTS = orjson.loads(OPENAPI.read_bytes())["paths"]["/v1/streams/{stream}/events"]["post"]
ALLOWED = {int(status) for status in _EVENTS["responses"]} - {500}
"""The documented answers without the one that is a fault of ours."""
_KINDS = {(kind.uri, kind.status) for kind in problems.ALL}


class BadAnswer(Exception):
    """Not an answer of ours, or none in time. The message is for a person."""


class Answer(NamedTuple):
    """One answer. closes: whether the connection ends with it."""

    status: int
    document: dict[str, Any]
    closes: bool


async def read_answer(reader: asyncio.StreamReader, *, head_only: bool = False) -> Answer | None:
    """The next answer but a 100; None when the connection ended in good order. Raises BadAnswer, OSError."""
    try:
        async with asyncio.timeout(ANSWER_S):
            while True:
                status, headers = await _read_head(reader)
                if status != 100:
                    break
            body = b"" if head_only else await reader.readexactly(int(headers[b"content-length"]))
    except TimeoutError:
        raise BadAnswer(f"no answer within {ANSWER_S} s") from None
    except asyncio.IncompleteReadError as error:
        if not error.partial:
            return None
        raise BadAnswer(f"the answer ends early: {error.partial[:200]!r}") from None
    if status not in ALLOWED:
        raise BadAnswer(f"status {status}: {body[:500]!r}")
    document = {} if head_only else _check_body(status, headers, body)
    return Answer(status, document, headers.get(b"connection") == b"close")


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
    status = _STATUS.fullmatch(first)
    found = [_HEADER.fullmatch(line) for line in lines]
    if status is None or None in found:
        raise BadAnswer(f"not HTTP: {first!r} {lines!r}")
    headers = {match[1].lower(): match[2] for match in found if match is not None}
    if len(headers) != len(lines):
        raise BadAnswer(f"a header stands twice: {lines!r}")
    number = int(status[1])
    if number >= 200 and not {b"content-length", b"content-type", b"date"} <= set(headers):
        raise BadAnswer(f"a header is missing: {lines!r}")
    return number, headers


def _check_body(status: int, headers: dict[bytes, bytes], body: bytes) -> dict[str, Any]:
    document = orjson.loads(body)
    if status in (200, 207):
        if headers[b"content-type"] != b"application/json":
            raise BadAnswer(f"another media type: {headers!r}")
    elif headers[b"content-type"] != b"application/problem+json" or (document["type"], status) not in _KINDS:
        raise BadAnswer(f"not a problem of ours: {status} {headers!r} {body[:500]!r}")
    assert isinstance(document, dict)
    return document
