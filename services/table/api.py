"""The API: point reads, ranges, and changes as server-sent events. A point read of a table that has its token is answered at
once; whatever waits is a coroutine of the connection.

Each token names its topic (`services.core.offset_token`). One of a topic that was deleted is refused, never answered with the
events of the next one.
"""

import asyncio
import base64
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

import orjson

from services.core import metrics
from services.core.broker.errors import BrokerError, OffsetOutOfRange
from services.core.offset_token import Token, format_token, parse_token
from services.core.security.keys import ApiKey
from services.core.times import now_ms
from services.table import problems
from services.table.access import Access, unknown_table
from services.table.follower import Applied, Follower
from services.table.http_server import JSON, Answer, Request
from services.table.problems import Refused
from services.table.snapshots import Snapshots
from services.table.store import Change, Rebuild, Row, Store

MAX_KEY_BYTES = 1024
MAX_LIMIT, DEFAULT_LIMIT = 1000, 100
MAX_RANGE_BYTES = 1 << 20
HEARTBEAT_S = 15.0
_STREAM = b"text/event-stream"
_TABLES, _SNAPSHOT = "/v1/tables/", "/v1/snapshot/"
_ROOT = orjson.dumps({"service": "penstock table", "openapi": "/openapi.json"})


class Api:
    """Answers every request. wait: seconds for `at_least`. behind_ms: a table that is further behind answers with 503."""

    def __init__(
        self,
        followers: Mapping[str, Follower],
        access: Access,
        openapi: bytes,
        *,
        wait: float,
        behind_ms: int,
        max_changes: int,
    ) -> None:
        self._followers, self._access = followers, access
        self._wait, self._behind_ms, self._max_changes = wait, behind_ms, max_changes
        self._documents = {"/": _ROOT, "/openapi.json": openapi}
        self._following = 0
        self._snapshots = Snapshots()

    def handle(self, request: Request) -> Answer | Coroutine[Any, Any, Answer | None]:
        """Answer one request. Raises Refused."""
        path = request.path
        document = self._documents.get(path)
        key = self._access.authenticate(request) if document is None else None
        if request.method != "GET":
            raise Refused(problems.METHOD_NOT_ALLOWED, "This path allows only GET.", allow="GET")
        if document is not None:
            return Answer(200, document)
        if path.startswith(_TABLES):
            stream, slash, rest = path[len(_TABLES) :].partition("/")
            follower = self._find(stream, key)
            if not slash:
                return self._range(follower, request)
            if rest == "" and request.query == "":
                raise Refused(problems.BAD_KEY, "The key is empty.")
            return self._point(follower, rest, request)
        if path.startswith(_SNAPSHOT):
            follower = self._find(path[len(_SNAPSHOT) :], key)
            return self._snapshots.send(follower, self._open(follower), request)
        raise Refused(problems.NOT_FOUND, "Nothing is at this path. GET /openapi.json lists the paths.")

    def _find(self, stream: str, key: ApiKey | None) -> Follower:
        """Raises Refused."""
        follower = self._followers.get(stream)
        if follower is None:
            raise unknown_table()
        self._access.authorise(key, stream)
        return follower

    # Point reads.

    def _point(self, follower: Follower, raw: str, request: Request) -> Answer | Coroutine[Any, Any, Answer]:
        key = _read_key(raw)
        if not request.query:
            return self._get(follower, key, request)
        wanted = _read_query(request.query, {"at_least": _token}).get("at_least")
        if wanted is None or _has(follower, wanted):
            return self._get(follower, key, request)
        return self._get_later(follower, key, wanted, request)

    async def _get_later(self, follower: Follower, key: bytes, wanted: Token, request: Request) -> Answer:
        await self._reach(follower, wanted)
        return self._get(follower, key, request)

    def _get(self, follower: Follower, key: bytes, request: Request) -> Answer:
        store = self._open(follower)
        try:
            row = store.get(key)
        except Rebuild as rebuild:
            raise _damaged(follower, rebuild) from None
        if row is None:
            raise Refused(problems.KEY_NOT_FOUND, "No event of the stream has this key, or its newest one deleted it.")
        _, value, media, partition, offset = row
        tag = f'"{follower.topic}.{partition}:{offset}"'
        more = b"ETag: %b\r\n" % tag.encode()
        if request.headers.get("if-none-match") == tag:
            return Answer(304, b"", more=more)
        return Answer(200, value, JSON if media is None else media.encode(), more)

    # Ranges.

    def _range(self, follower: Follower, request: Request) -> Answer | Coroutine[Any, Any, Answer | None]:
        known: dict[str, Callable[[str], Any]] = {
            "prefix": _key, "after": _cursor, "limit": _limit, "at_least": _token, "changes_after": _token
        }  # fmt: skip
        asked = _read_query(request.query, known)
        if "changes_after" in asked or _STREAM.decode() in request.headers.get("accept", ""):
            if asked.keys() - {"changes_after", "prefix"}:
                raise Refused(problems.BAD_PARAMETER, "With changes_after, this path takes only prefix.")
            return self._changes(follower, asked, request)
        wanted: Token | None = asked.pop("at_least", None)
        if wanted is None or _has(follower, wanted):
            return self._list(follower, asked)
        return self._list_later(follower, wanted, asked)

    async def _list_later(self, follower: Follower, wanted: Token, asked: Mapping[str, Any]) -> Answer:
        await self._reach(follower, wanted)
        return self._list(follower, asked)

    def _list(self, follower: Follower, asked: Mapping[str, Any]) -> Answer:
        store = self._open(follower)
        limit = asked.get("limit", DEFAULT_LIMIT)
        token = format_token(
            follower.topic, follower.nexts, follower.fresh_ms
        )  # before the rows: they are as new, or newer
        try:
            rows = store.scan(asked.get("prefix", b""), asked.get("after"), limit, MAX_RANGE_BYTES)
        except Rebuild as rebuild:
            raise _damaged(follower, rebuild) from None
        size = sum([len(row.key) + len(row.value) for row in rows])
        is_last = len(rows) < limit and size < MAX_RANGE_BYTES
        after = None if is_last else base64.urlsafe_b64encode(rows[-1].key).decode()
        body = b'{"rows":[%b],"next":%b,"token":"%b"}' % (
            b",".join([_render_row(row, follower.topic) for row in rows]),
            orjson.dumps(after),
            token.encode(),
        )
        return Answer(200, body)

    # Changes.

    async def _changes(self, follower: Follower, asked: Mapping[str, Any], request: Request) -> Answer | None:
        """Server-sent events until the client goes. Each has an id from which it can go on."""
        last = request.headers.get("last-event-id")
        token: Token | None = asked.get("changes_after") if last is None else _token(last)
        self._open(follower)
        if token is not None:
            await self._check_topic(follower, token)
        if token is not None and token.at_ms is not None and now_ms() - token.at_ms >= follower.max_age_ms:
            detail = "Tombstones since the token may be gone. Read the whole table again, and go on from its token."
            raise Refused(problems.TOKEN_EXPIRED, detail)
        fresh = follower.fresh_ms if token is None else token.at_ms
        if token is not None and not token.ends and fresh is None:  # from the beginning
            fresh = now_ms()
        nexts = dict(follower.nexts) if token is None else {p: token.ends.get(p, -1) + 1 for p in follower.ends}
        if token is not None and any(nexts[p] > follower.ends[p] for p in nexts):
            raise _unknown_token()
        if self._following >= self._max_changes:
            raise Refused(problems.BUSY, f"{self._max_changes} clients follow changes.", retry_after=5)
        self._following += 1
        metrics.TABLE_FOLLOWING.set(self._following)
        try:
            await request.connection.write(request.connection.start_stream(_STREAM))
            await self._follow(follower, nexts, fresh, asked.get("prefix", b""), request)
        finally:
            self._following -= 1
            metrics.TABLE_FOLLOWING.set(self._following)
        return None

    async def _follow(
        self, follower: Follower, nexts: dict[int, int], fresh: int | None, prefix: bytes, request: Request
    ) -> None:
        """fresh: the time (ms) up to which the client knows everything; None: not known. While it reads old changes it is behind
        the table, and may miss a tombstone that the table has seen."""
        connection, built, topic = request.connection, follower.built, follower.topic
        idle_s = min(HEARTBEAT_S, follower.max_age_ms / 4000)
        while connection.is_open:
            moved, table_fresh = False, follower.fresh_ms
            for partition in list(follower.nexts):
                nexts.setdefault(partition, 0)
                try:
                    piece = await _read_piece(follower, partition, nexts[partition])
                except OffsetOutOfRange:
                    await connection.write(_end("token-expired"))
                    return
                if piece is None:
                    continue
                moved = True
                begin, nexts[partition] = nexts[partition], piece.next
                await connection.write(_render_changes(piece, begin, prefix, topic, format_token(topic, nexts, fresh)))
            if (reason := self._why_end(follower, built, fresh, request)) is not None:
                await connection.write(_end(reason))
                return
            if all(nexts.get(partition, 0) >= offset for partition, offset in follower.nexts.items()):
                fresh = table_fresh
            if not moved:
                await follower.wait_change(idle_s)
                if not any(follower.nexts.get(p, 0) > offset for p, offset in nexts.items()):
                    await connection.write(b":\n\n")

    def _why_end(self, follower: Follower, built: int, fresh: int | None, request: Request) -> str | None:
        """Why a client that follows must not go on; None: it may."""
        if follower.store is None or follower.built != built:
            return "table-rebuilt"
        if fresh is not None and now_ms() - fresh >= follower.max_age_ms:
            return "token-expired"
        try:
            self._access.authorise(self._access.authenticate(request), follower.stream)
        except Refused:  # its key was revoked, or has expired
            return "no-valid-key"
        return None

    # Waiting and readiness.

    def _open(self, follower: Follower) -> Store:
        """The table's file. Raises Refused while the table is not as new as it must be."""
        if (reason := follower.why_not_ready(self._behind_ms)) is not None or follower.store is None:
            raise Refused(problems.NOT_READY, f"{reason or follower.stream}.", retry_after=2)
        return follower.store

    async def _reach(self, follower: Follower, wanted: Token) -> None:
        """Wait until the table has the token. Raises Refused."""
        await self._check_topic(follower, wanted)
        waiting = follower.reach(wanted.ends)
        if waiting is None:
            raise Refused(problems.BUSY, "Too many clients wait for a token.", retry_after=1)
        try:
            async with asyncio.timeout(self._wait):
                await waiting
        except TimeoutError:
            if any(offset >= follower.ends.get(p, math.inf) for p, offset in wanted.ends.items()) or (
                wanted.ends.keys() - follower.ends.keys() and follower.ends
            ):
                raise _unknown_token() from None
            detail = f"The table did not reach the token within {self._wait:g} s."
            raise Refused(problems.NOT_REACHED, detail, retry_after=1) from None

    async def _check_topic(self, follower: Follower, token: Token) -> None:
        """Raises Refused for a token of another topic than the table's: 410 when the broker says that the table's is the present
        one, 503 when the table has not noticed the new one yet."""
        if token.topic in ("", follower.topic):
            return
        try:
            is_present = follower.store is not None and await follower.is_present()
        except BrokerError:
            is_present = False
        if not is_present:
            detail = f"{follower.stream}: the token is of another topic. The table has not noticed a new topic yet."
            raise Refused(problems.NOT_READY, detail, retry_after=2)
        if token.topic != follower.topic:
            detail = "The stream was deleted and created again. Read the whole table again, and go on from its token."
            raise Refused(problems.TOKEN_GONE, detail)


def _has(follower: Follower, wanted: Token) -> bool:
    return wanted.topic in ("", follower.topic) and follower.has(wanted.ends)


async def _read_piece(follower: Follower, partition: int, offset: int) -> Applied | None:
    """The changes from this offset on. None: there are none, or they cannot be read now. Raises OffsetOutOfRange."""
    if (piece := follower.recent(partition, offset)) is not None:
        return piece
    try:
        return await follower.read(partition, offset)
    except OffsetOutOfRange:
        raise
    except BrokerError:
        return None


def _unknown_token() -> Refused:
    return Refused(
        problems.TOKEN_UNKNOWN, "The token names an offset that the stream does not have. Read the whole table again."
    )


def _damaged(follower: Follower, rebuild: Rebuild) -> Refused:
    follower.damaged(rebuild)
    return Refused(problems.NOT_READY, f"{follower.stream}: the table is built again.", retry_after=5)


def _end(reason: str) -> bytes:
    """The last event of a client that cannot go on from its id."""
    return b'event: end\ndata: {"reason":"%b"}\n\n' % reason.encode()


def _render_row(row: Row, topic: str) -> bytes:
    return b'{%b,%b,"token":"%b.%d:%d"}' % (
        _render_key(row.key),
        _render_value(row.value, row.media),
        topic.encode(),
        row.partition,
        row.offset,
    )


def _render_key(key: bytes) -> bytes:
    try:
        return b'"key":%b' % orjson.dumps(key.decode())
    except UnicodeDecodeError:
        return b'"key_base64":"%b"' % base64.b64encode(key)


def _render_value(value: bytes, media: str | None) -> bytes:
    if media is None:
        return b'"value":%b' % value
    return b'"media":%b,"value_base64":"%b"' % (orjson.dumps(media), base64.b64encode(value))


def _render_changes(piece: Applied, begin: int, prefix: bytes, topic: str, token: str) -> bytes:
    """The events of a piece from offset `begin` on. Only the last one has the id: the others are sent again after a cut."""
    changes: Sequence[Change] = [
        change for change in piece.changes if change.offset >= begin and change.key.startswith(prefix)
    ]
    parts, mark, ident = [], topic.encode(), token.encode()
    for change in changes:
        what = b"delete" if change.value is None else b"put"
        body = b"{" + _render_key(change.key)
        if change.value is not None:
            body += b"," + _render_value(change.value, change.media)
        data = body.replace(b"\n", b" ").replace(b"\r", b" ")
        parts.append(b'event: %b\ndata: %b,"token":"%b.%d:%d"}\n' % (what, data, mark, piece.partition, change.offset))
    if not parts:
        return b"id: %b\n\n" % ident
    return b"\n".join(parts) + b"id: %b\n\n" % ident


# The parts of a URL.


def _read_query(query: str, known: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """Only known parameters, each at most once. Raises Refused."""
    found: dict[str, Any] = {}
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=len(known) + 1, errors="strict")
    except (ValueError, UnicodeDecodeError):
        pairs = [("", "")] if query else []
    for name, text in pairs:
        if name not in known or name in found:
            raise Refused(
                problems.BAD_PARAMETER, f"This path takes these parameters, each at most once: {', '.join(known)}."
            )
        found[name] = known[name](text)
    return found


def _read_key(raw: str) -> bytes:
    key = unquote_to_bytes(raw) if "%" in raw else raw.encode()
    if not 0 < len(key) <= MAX_KEY_BYTES or "/" in raw:
        raise Refused(problems.BAD_KEY, f"The key has 1 to {MAX_KEY_BYTES} bytes, percent-encoded; a / in it is %2F.")
    return key


def _key(text: str) -> bytes:
    if len(key := text.encode()) > MAX_KEY_BYTES:
        raise Refused(problems.BAD_PARAMETER, f"The prefix has more than {MAX_KEY_BYTES} bytes.")
    return key


def _cursor(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode("ascii"), altchars=b"-_", validate=True)[:MAX_KEY_BYTES]
    except ValueError:
        raise Refused(problems.BAD_PARAMETER, "The cursor is not the value of the member next of an answer.") from None


def _limit(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 4 or not 1 <= int(text) <= MAX_LIMIT:
        raise Refused(problems.BAD_PARAMETER, f"The limit is a number from 1 to {MAX_LIMIT}.")
    return int(text)


def _token(text: str) -> Token:
    found = parse_token(text)
    if found is None:
        raise Refused(
            problems.BAD_PARAMETER,
            "The token is not valid. A token is a mark of the topic, a dot, and partition:offset joined by commas.",
        )
    return found
