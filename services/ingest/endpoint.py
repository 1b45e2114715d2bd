"""The API: POST /v1/streams/{stream}/events, from a request's head to its answer. One await on the broker per request."""

import asyncio
import re
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from typing import cast
from urllib.parse import unquote

import msgspec
import orjson
from aiohttp import hdrs
from aiohttp.http import RawRequestMessage

from services.core.broker.errors import BrokerClosed, BrokerError, Overloaded, Unavailable
from services.core.broker.producer import Producer, SendResult
from services.core.control.key_marks import KeyMarker
from services.core.offset_token import format_token
from services.core.security.keys import ApiKey
from services.ingest import problems
from services.ingest.access import Access, check_query, unknown_stream
from services.ingest.answer import RETRY_AFTER_S, Answer, answer, find_failures, refuse
from services.ingest.body_formats import SLICE_BYTES, check_format, choose_encoding, read_items, read_slices, unpack
from services.ingest.cloudevents import NO_DATA
from services.ingest.connection import Connection
from services.ingest.intake import Intake, Prepared
from services.ingest.json_events import Items, Limits
from services.ingest.problems import SEND_AGAIN, Refused

_STREAM_PATH = re.compile(r"/v1/streams/[^/]+/events")
_KEY_PATH = re.compile(r"/v1/streams/([^/]+)/keys/([^/]+)")
_ROOT = orjson.dumps({"service": "penstock ingest", "openapi": "/openapi.json"})
_NO_PATH = "Nothing is at this path. GET /openapi.json lists the paths."
TOKEN = b"Penstock-Token"
_NOT_QUEUED = Unavailable("the events were not sent")
_LARGE_AT_ONCE = 2
"""Bodies larger than a slice that are parsed at the same time."""


def events_path(stream: str) -> str:
    """The path to which clients send the events of a stream."""
    return f"/v1/streams/{stream}/events"


class Endpoint:
    """Answers every request of this process. `intakes` by stream name; `openapi` is the document, as JSON. marker: marks streams
    as keyed before they get their first event with a key. others: the streams whose topics are others'."""

    def __init__(
        self,
        intakes: Mapping[str, Intake],
        producer: Producer,
        marker: KeyMarker,
        access: Access,
        limits: Limits,
        openapi: bytes,
        executor: Executor,
        others: Collection[str] = (),
    ) -> None:
        self._routes = {events_path(name): intake for name, intake in intakes.items()}
        self._others = {events_path(name): name for name in others}
        self._documents = {"/": _ROOT, "/openapi.json": openapi}
        self._producer, self._marker, self._access = producer, marker, access
        self._limits, self._executor = limits, executor
        self._large = asyncio.Semaphore(_LARGE_AT_ONCE)

    async def handle(self, message: RawRequestMessage, connection: Connection) -> Answer:
        """Answer one request. Raises Refused for a path that is not a stream's, ClientGone, and programming errors."""
        self._access.check_host(message)
        intake = self._routes.get(message.path)
        key: str | None = None
        if intake is None or message.method != "POST":
            found = self._route(message)
            if isinstance(found, Answer):
                return found
            intake, key = found
        try:
            answered = await (self._post(intake, message, connection) if key is None else self._delete(intake, key))
        except Refused as refused:
            answered = refuse(refused)
        intake.tally.answered(answered.status)
        return answered

    async def _post(self, intake: Intake, message: RawRequestMessage, connection: Connection) -> Answer:
        access, headers = self._access, message.headers
        key = access.authenticate(message)
        access.authorise(key, intake.name)
        content_type, body_format = check_format(message)
        encoding = choose_encoding(headers.getall(hdrs.CONTENT_ENCODING, []))
        if not intake.partitions:
            raise _not_ready()
        body = await connection.read_body(message, self._limits.body_bytes)
        if encoding is not None:
            body = await self._unpack(key, body, encoding, connection)
        paid = access.charge_bytes(key, len(body))
        arrival, trace = time.time_ns() // 1_000_000, headers.get("traceparent")
        if len(body) <= SLICE_BYTES:
            items = read_items(body, content_type, body_format, message, self._limits)
            prepared = intake.prepare(items, arrival, trace)
            del items  # parsed payloads are most of a request's objects, and are not needed while the broker works
        else:
            async with self._large:
                slices = read_slices(body, content_type, body_format, message, self._limits)
                prepared = await intake.prepare_slices(slices, arrival, trace)
        del body
        access.charge(key, len(prepared.values) - paid)
        return await self._send(intake, prepared, arrival, wants_ids="Prefer" in headers and _wants_ids(message))

    async def _delete(self, intake: Intake, key: str) -> Answer:
        """Store a tombstone: a CloudEvent without data."""
        if not intake.compact:
            detail = "The stream keeps every event for its retention. Only a stream with compact: true forgets a key."
            raise Refused(problems.NOT_COMPACTED, detail)
        if not intake.partitions:
            raise _not_ready()
        arrival = time.time_ns() // 1_000_000
        items = Items([NO_DATA], [{}], range(1), [{"partitionkey": key}])
        prepared = intake.prepare(items, arrival, None)
        return await self._send(intake, prepared, arrival, wants_ids=False)

    async def _send(self, intake: Intake, prepared: Prepared, arrival: int, *, wants_ids: bool) -> Answer:
        refused, failed, retry_after = prepared.refused, set[int](), RETRY_AFTER_S
        result = None
        if prepared.parts:
            result = await self._store(intake, prepared, arrival)
            if result.failed:
                failed, more, retry_after = find_failures(result, prepared)
                refused = refused + more
        stored = [row for row in prepared.all_rows if row not in failed] if failed else prepared.all_rows
        if stored:
            intake.broker_failure = None
            _count(intake, prepared, stored, arrival)
            if intake.ledger is not None and (value := prepared.values[stored[0]]) is not None:
                intake.ledger.sample.offer(value)
        elif refused and refused[-1].kind.status >= 503:
            intake.broker_failure = time.monotonic(), refused[-1].kind.title
        if refused:
            intake.tally.refused([refusal.kind.name for refusal in refused])
        ids = [prepared.ids[row].decode() for row in stored] if wants_ids else None
        answered = answer(len(stored), refused, retry_after, ids)
        if intake.topic and stored and result is not None:
            return msgspec.structs.replace(answered, headers={**answered.headers, TOKEN: _make_token(intake, result)})
        return answered

    async def _store(self, intake: Intake, prepared: Prepared, arrival: int) -> SendResult:
        """The result of each part, which the ledger gets too. Raises Refused when nothing was queued."""
        known: SendResult | BrokerError | None = _NOT_QUEUED
        try:
            if prepared.has_keys and not self._marker.is_marked(intake.name):
                await self._mark(intake)
            known = None
            known = result = await self._producer.send_to(intake.name, prepared.parts)
        except Overloaded as error:
            known = error
            detail = f"The queue to the broker is full. Nothing was stored. {SEND_AGAIN}"
            raise Refused(problems.OVERLOADED, detail, retry_after=RETRY_AFTER_S) from None
        except BrokerClosed as error:
            known = error
            detail = f"This process is stopping. Nothing was stored. {SEND_AGAIN}"
            raise Refused(problems.BROKER_UNAVAILABLE, detail, retry_after=RETRY_AFTER_S) from None
        finally:
            if intake.ledger is not None:
                intake.ledger.settle(prepared.numbers, prepared.rows, prepared.times, arrival, known)
        return result

    async def _mark(self, intake: Intake) -> None:
        """Raises Refused, Overloaded, BrokerClosed. The events were not sent, whatever is known of the mark.

        A failure does not make this process unready: it stores events without keys, and another process could not write the mark.
        """
        try:
            await self._marker.mark(intake.name)
        except (Overloaded, BrokerClosed):
            raise
        except BrokerError:
            detail = f"The broker could not record that this stream has keys. Nothing was stored. {SEND_AGAIN}"
            raise Refused(problems.BROKER_UNAVAILABLE, detail, retry_after=RETRY_AFTER_S) from None

    async def _unpack(self, key: ApiKey | None, body: bytes, encoding: str, connection: Connection) -> bytes:
        """Unpack on a thread, because 5 MB need 10 ms. Raises Refused; a body that cannot be unpacked counts as the largest."""
        loop, limit = asyncio.get_running_loop(), self._limits.body_bytes
        try:
            unpacked = await loop.run_in_executor(self._executor, unpack, body, encoding, limit)
        except Refused:
            self._access.charge_bytes(key, limit)
            raise
        connection.hold_unpacked(len(unpacked))
        return unpacked

    def _route(self, message: RawRequestMessage) -> tuple[Intake, str | None] | Answer:
        """Route any request but a plain POST to a known stream: its stream, and the key to delete. Raises Refused."""
        check_query(message.url.raw_query_string)
        path = unquote(message.url.raw_path)
        document = self._documents.get(path)
        if document is not None:
            _check_method(message, "GET, HEAD")
            return Answer(200, document)
        if not path.startswith("/v1/"):
            raise Refused(problems.NOT_FOUND, _NO_PATH)
        key = self._access.authenticate(message)
        intake, doomed, allowed = self._routes.get(path), None, "POST"
        if (of_key := _KEY_PATH.fullmatch(message.url.raw_path)) is not None:
            intake, allowed = self._routes.get(events_path(unquote(of_key[1]))), "DELETE"
            doomed = _read_key(of_key[2])
        if intake is None:
            if of_key is None and not _STREAM_PATH.fullmatch(path):
                raise Refused(problems.NOT_FOUND, _NO_PATH)
            if (name := self._others.get(path)) is not None and (key is None or key.covers(name)):
                detail = f"The events of stream {name} come from a topic that others write. Send them there."
                raise Refused(problems.STREAM_READ_ONLY, detail)
            raise unknown_stream([one.name for one in self._routes.values()] if key is None else [])
        self._access.authorise(key, intake.name)
        _check_method(message, allowed)
        self._access.charge(key, int(doomed is not None))
        return intake, doomed


def _not_ready() -> Refused:
    detail = f"The broker does not have the stream yet, or has not answered. Nothing was stored. {SEND_AGAIN}"
    return Refused(problems.STREAM_NOT_READY, detail, retry_after=RETRY_AFTER_S)


def _read_key(text: str) -> str:
    """From the path. Raises Refused."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise Refused(problems.BAD_KEY, "The key in the path is not percent-encoded UTF-8.") from None


def _make_token(intake: Intake, result: SendResult) -> bytes:
    """The offset token of a write (docs/tables.md)."""
    return format_token(intake.topic, {part.partition: part.last + 1 for part in result.parts}).encode()


def _count(intake: Intake, prepared: Prepared, stored: Sequence[int], arrival: int) -> None:
    times, values = prepared.times, prepared.values
    if intake.compact:
        values = [value or b"" for value in values]
    if len(stored) < len(times):
        times, values = [times[row] for row in stored], [values[row] for row in stored]
    intake.tally.accepted(times, sum(map(len, cast("list[bytes]", values))), arrival, time.time_ns() // 1_000_000)


def _check_method(message: RawRequestMessage, allowed: str) -> None:
    if message.method not in allowed.split(", "):
        raise Refused(problems.METHOD_NOT_ALLOWED, f"This path allows only {allowed}.", allow=allowed)


def _wants_ids(message: RawRequestMessage) -> bool:
    """RFC 7240: whether the client asks for the ids of its events."""
    preferences = ",".join(message.headers.getall("Prefer", [])).lower().split(",")
    return any(preference.partition(";")[0].strip() == "return=representation" for preference in preferences)
