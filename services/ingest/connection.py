"""One HTTP/1.1 connection over aiohttp's parser (llhttp). docs/adr/0004-ingest-hot-path.md says why this is not aiohttp's server.

These rules hold:

- Requests of one connection are handled one by one, in order. Bytes that arrive after the current request are kept unparsed, one
  read of the socket at most, until the client has received the answer. The rest stays in the kernel. A task exists only while
  there is a request to handle: an idle connection costs a socket and this object.
- Every byte counts against the server's bound from its arrival until the client has the answer. An unsent answer counts too.
- Each phase has a deadline, which the server checks: nothing waits for a client for ever.
- A request whose framing is unclear gets 400 and ends the connection, because the bytes behind it cannot be trusted.
- When the server ends a connection while the client still sends, it stops writing first and reads on for a little while.
  Otherwise the client's kernel would drop the answer.
"""

import asyncio
import enum
import socket
from typing import TYPE_CHECKING

import structlog
from aiohttp.http import HttpProcessingError, HttpVersion11, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from services.core import metrics
from services.ingest import problems
from services.ingest.answer import Answer, refuse
from services.ingest.http_framing import MAX_HEAD_BYTES, HttpProtocol, Incoming, check_head_size, explain, switches
from services.ingest.problems import Refused, body_too_large

if TYPE_CHECKING:
    from services.ingest.http_server import HttpServer

log = structlog.get_logger()

LINGER_S = 3.0
LINGER_BYTES = 16_000_000
ANSWER_S = 30.0
UNSENT_BYTES = 1 << 15
"""With more unsent bytes, no further request is parsed until the client has received them."""
SEND_BUFFER_BYTES = 1 << 16
"""Bytes of answers that the kernel may keep for a connection (Linux doubles the figure). Its default is up to 4 MB each,
and all connections wait when its memory is short."""
_FOREVER = float("inf")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Phase(enum.Enum):
    """What a connection waits for, and what happens at its deadline."""

    IDLE = enum.auto()
    """For the next request. Then: closed without an answer."""
    HEAD = enum.auto()
    """For the rest of a request's head. Then: 408."""
    BODY = enum.auto()
    """For the rest of its body. Then: 408."""
    HANDLING = enum.auto()
    """For this process or the broker, which has time-outs of its own: no deadline."""
    ANSWERING = enum.auto()
    """For the client to receive its answers. Then: aborted."""
    LINGER = enum.auto()
    """For the client to stop sending. Then: aborted."""


class ClientGone(Exception):
    """The connection was lost before the request had arrived."""


class Connection(HttpProtocol):
    """The event loop's protocol object.

    phase, deadline (loop time): see Phase. held: bytes that it counts against the server's bound.
    """

    __slots__ = (
        "_ahead",
        "_arrived",
        "_broken",
        "_eof",
        "_head_bytes",
        "_last",
        "_lingered",
        "_payload",
        "_tail",
        "_task",
        "_unpacked",
        "_unsent",
        "deadline",
        "held",
        "phase",
        "server",
    )

    def __init__(self, server: "HttpServer", loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.open_parser()
        self._task: asyncio.Task[None] | None = None
        self._broken = self._last = self._eof = False
        self._head_bytes = self._lingered = self.held = 0
        self._ahead = b""
        """Bytes behind the current request, not parsed."""
        self._arrived = self._tail = 0
        """Bytes of the current request and of those that the parser keeps behind it; the most that the latter can be."""
        self._unpacked = self._unsent = 0
        self.server = server
        self._payload: StreamReader = EMPTY_PAYLOAD
        self.phase = Phase.IDLE
        self.deadline = _FOREVER

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self.transport is not None:
            self.transport.set_write_buffer_limits(high=UNSENT_BYTES)
            connected = self.transport.get_extra_info("socket")
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self.deadline = self.loop.time() + self.server.timeouts.head
        refusal = self.server.add(self)
        if refusal is not None:
            self._finish(refusal)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._fail_body(ClientGone())
        self.close_parser()
        self._ahead = b""
        self._unsent = 0
        if self._task is None:
            self._release()
            self.server.remove(self)

    def eof_received(self) -> bool:
        """The client sends no more. It may still wait for answers to what it sent in full."""
        self._fail_body(Refused(problems.INCOMPLETE_BODY, "The connection ended before the body did."))
        self._eof = True
        return self._task is not None and self.phase is not Phase.LINGER

    def data_received(self, data: bytes) -> None:
        if self.transport is None:  # the parser may go on after the connection was lost
            return
        if self.phase is Phase.LINGER or self._broken:
            self._discard(data)
            return
        if self._task is not None and self._payload.is_eof():
            self._keep(data)
            return
        if data and not self._admit(len(data)):  # without any, the parser continues with its own bytes
            self._break(self.server.overloaded())
            return
        try:
            message = self._parse(data)
        except HttpProcessingError as error:
            self._break(explain(error))
            return
        if message is not None:
            self._task = self.loop.create_task(self._serve(message))
            self.server.active += 1
        elif data and self._task is None:
            self._await_head(len(data))

    # What the server and the handler of a request call.

    async def read_body(self, message: RawRequestMessage, limit: int) -> bytes:
        """The body of the current request, at most `limit` bytes.

        Raises Refused: too large, too slow, incomplete, or this process holds too many bytes. Raises ClientGone.
        """
        if self._payload.is_eof():
            body: bytes = self._payload.read_nowait()
            if len(body) > limit:
                raise body_too_large(limit)
            self.server.check_room()
            return body
        if int(message.headers.get("Content-Length", "0")) > limit:
            raise body_too_large(limit)
        self.server.check_room()
        self._expect(message.headers.get("Expect"))
        self._wait(Phase.BODY, self.server.timeouts.body)
        chunks: list[bytes] = []
        size = 0
        try:
            while chunk := await self._payload.readany():
                chunks.append(chunk)
                size += len(chunk)
                if size > limit:
                    raise body_too_large(limit)
                self.server.check_room()
        finally:
            self.phase, self.deadline = Phase.HANDLING, _FOREVER
        return b"".join(chunks)

    def hold_unpacked(self, size: int) -> None:
        """The unpacked body has so many bytes more, held until its answer. Raises Refused when this process holds too many."""
        self._unpacked += size
        self._count()
        self.server.check_room()

    def expire(self) -> None:
        """The deadline has passed."""
        if self.phase is Phase.HEAD:
            self._finish(
                refuse(
                    Refused(
                        problems.TOO_SLOW,
                        f"The head of the request did not arrive within {self.server.timeouts.head:g} s.",
                    )
                )
            )
        elif self.phase is Phase.BODY:
            self.deadline = _FOREVER
            self._fail_body(
                Refused(
                    problems.TOO_SLOW,
                    f"The body did not arrive within {self.server.timeouts.body:g} s. Send fewer events in one request.",
                )
            )
        elif self.phase is Phase.ANSWERING:
            self.cut_off()
        else:
            self.abort()

    def cut_off(self) -> None:
        """End a connection whose client does not receive its answers. Its bytes are free at once."""
        metrics.INGEST_CUT_OFF.labels("answers_not_taken").inc()
        self.abort()
        self.phase = Phase.LINGER
        self._unsent = 0
        self._release()

    def drain(self) -> None:
        """Accept no new request: end now, or after the current answer."""
        self._last = True
        if self._task is None and self.phase is not Phase.LINGER and self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self.transport is not None:
            self.transport.abort()

    # Private.

    def _wait(self, phase: Phase, seconds: float) -> None:
        self.phase, self.deadline = phase, self.loop.time() + seconds

    def _expect(self, expectation: str | None) -> None:
        """Ask a client for its body when it waits to be asked."""
        if expectation is None:
            return
        if expectation.lower() != "100-continue":
            raise Refused(
                problems.EXPECTATION_FAILED,
                "The header Expect is not 100-continue. Leave it out, or send Expect: 100-continue.",
            )
        if self.transport is not None:
            self.transport.write(_CONTINUE)

    def _parse(self, data: bytes) -> Incoming | None:
        """The next request, if its head is complete. The parser stops behind each request. Raises HttpProcessingError."""
        request = self.feed_parser(data)
        if request is None:
            return None
        if self._head_bytes + self._tail > MAX_HEAD_BYTES:
            check_head_size(request[0])
        self._head_bytes = 0
        self._payload = request[1]
        return request

    def _admit(self, size: int) -> bool:
        """Count bytes of the current request or the next one. False when too many are held even to parse and refuse them."""
        self._arrived += size
        self._tail = size
        self.held += size
        return self.server.hold(size) or self.server.make_room() or not self.server.is_flooded

    def _keep(self, data: bytes) -> None:
        """Bytes after the current request. No more is read until the client has received its answer."""
        self._ahead += data
        self._count()
        self.hold_reading()
        if not self.server.make_room():  # the client gets the current answer, and then 503
            self._ahead, self._broken = b"", True
            self._count()

    def _next(self) -> Incoming | None:
        """The next request, from the bytes that were read already. Raises HttpProcessingError."""
        if self._broken:
            return None
        data, self._ahead = self._ahead, b""
        self._tail += len(data)
        message = self._parse(data)
        self._unpacked = 0
        if message is None:
            self._arrived = self._tail = 0  # the parser keeps a part of a head at most
            self.server.hold(-self.held)
            self.held = 0
        else:
            self._arrived = self._tail
            self._count()
        if message is None or not message[1].is_eof():
            self.release_reading()
        return message

    def _count(self) -> None:
        held = self._arrived + len(self._ahead) + self._unpacked + self._unsent
        self.server.hold(held - self.held)
        self.held = held

    def _release(self) -> None:
        self._arrived = self._tail = self._unpacked = 0
        self._ahead = b""
        self._count()

    def _await_head(self, size: int) -> None:
        if self.phase is not Phase.HEAD:
            self._wait(Phase.HEAD, self.server.timeouts.head)
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._finish(
                refuse(
                    Refused(
                        problems.HEAD_TOO_LARGE,
                        f"The head of the request has more than {MAX_HEAD_BYTES} bytes. Send fewer or shorter headers.",
                    )
                )
            )

    def _fail_body(self, error: Exception) -> None:
        """A body that is still arriving is cut off: its reader gets the error."""
        if not self._payload.is_eof():
            self._payload.set_exception(error)

    def _break(self, refused: Refused) -> None:
        """The bytes are not HTTP, or too many. The current body never ends."""
        self._broken = True
        if self._task is None:
            self._finish(refuse(refused))
        else:
            self._fail_body(refused)

    async def _serve(self, incoming: Incoming | None) -> None:
        """Handle requests until none is left or the connection ends. The connection owns this task."""
        try:
            while incoming is not None:
                await self._serve_one(*incoming)
                if self.phase is Phase.LINGER:
                    return
                incoming = self._next()
            self._close_if_ending()
        except HttpProcessingError as error:
            self._broken = True
            self._finish(refuse(explain(error)))
        except (ClientGone, ConnectionError):
            pass  # nobody receives an answer
        except Exception as error:
            log.exception("connection_failed", kind=type(error).__name__, exc_info=error)
            if self.transport is not None:
                self.transport.abort()
        finally:
            self._task = None
            self.server.active -= 1
            if self.transport is None:
                self._release()
                self.server.remove(self)
            elif self.phase is not Phase.LINGER:
                self._wait(Phase.IDLE, self.server.timeouts.idle)

    async def _serve_one(self, message: RawRequestMessage, payload: StreamReader) -> None:
        self.phase, self.deadline = Phase.HANDLING, _FOREVER
        answer = await self.server.respond(message, self)
        ends = answer.close or message.should_close or message.version is not HttpVersion11 or switches(message)
        if ends or self._last or not payload.is_eof():
            self._finish(answer, head_only=message.method == "HEAD")
            return
        if self.transport is None:
            raise ClientGone
        self.transport.write(answer.render(close=False, date=self.server.date, head_only=message.method == "HEAD"))
        if self.writing_paused:
            await self._drain_answers(self.transport)

    async def _drain_answers(self, transport: asyncio.Transport) -> None:
        """Wait until the client has received most of its answers. Read nothing until then."""
        self._arrived, self._unpacked, self._unsent = self._tail, 0, transport.get_write_buffer_size()
        self._count()
        self.hold_reading()
        self._wait(Phase.ANSWERING, ANSWER_S)
        self.server.make_room()
        await self.drain_writes()
        self._unsent = 0

    def _close_if_ending(self) -> None:
        """Nothing is left to answer: end the connection if it has to end."""
        if self._broken:
            self._finish(refuse(self.server.overloaded()))
        elif (self._eof or self._last) and self.transport is not None:
            self.transport.close()

    def _finish(self, answer: Answer, *, head_only: bool = False) -> None:
        """The last answer of this connection."""
        transport = self.transport
        if transport is None:
            return
        transport.write(answer.render(close=True, date=self.server.date, head_only=head_only))
        self._wait(Phase.LINGER, LINGER_S)
        self._unsent = transport.get_write_buffer_size()
        self._release()
        has_all = self._task is not None and self._payload.is_eof() and not self._broken
        if has_all or not transport.can_write_eof():
            transport.close()
            return
        transport.write_eof()
        self.read_on()

    def _discard(self, data: bytes) -> None:
        self._lingered += len(data)
        if self._lingered > LINGER_BYTES:
            self.abort()
