"""One HTTP/1.1 connection: aiohttp's parser (llhttp) below, one answer after the other above.

Why not aiohttp's own server: docs/adr/0004-ingest-hot-path.md. What must hold here:

- Requests of one connection are handled one by one, in order; what is pipelined behind waits in a short queue, then in the
  kernel. A task exists only while there is a request to handle: an idle connection costs a socket and this object.
- Each phase has a deadline, checked by the server's sweep: nothing waits for a client for ever.
- A request whose framing is unclear is answered 400 and ends the connection: what follows it cannot be trusted.
- Where we end a connection while the client still sends, we first stop writing and read on a little, or the client's
  kernel would throw our answer away.
"""

import asyncio
import enum
from collections import deque
from typing import TYPE_CHECKING

import structlog
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpProcessingError, HttpVersion11, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader

from services.ingest import problems
from services.ingest.http_answer import Answer, refuse
from services.ingest.http_framing import MAX_HEAD_BYTES, MAX_PIPELINED, Incoming, check_heads, explain, make_parser
from services.ingest.problems import Refused

if TYPE_CHECKING:
    from services.ingest.http_server import HttpServer

log = structlog.get_logger()

LINGER_S = 3.0
LINGER_BYTES = 16_000_000
ANSWER_S = 30.0
FOREVER = float("inf")


class Phase(enum.Enum):
    """What the connection waits for, and so what it means when its deadline passes."""

    IDLE = enum.auto()
    """The next request: closed without a word."""
    HEAD = enum.auto()
    """The rest of a request's head: 408."""
    BODY = enum.auto()
    """The rest of its body: 408."""
    HANDLING = enum.auto()
    """Us, or the broker, which has time-outs of its own: no deadline."""
    ANSWERING = enum.auto()
    """The client to take its answers: aborted."""
    LINGER = enum.auto()
    """The client to stop sending: aborted."""


class ClientGone(Exception):
    """The connection was lost before the request had arrived."""


class Connection(BaseProtocol):
    """The protocol object that the event loop talks to.

    phase, deadline (loop time): see Phase. payload: the body of the request under way. reserved: bytes that it holds of the
    server's bound on bytes in flight.
    """

    __slots__ = (
        "_broken",
        "_head_bytes",
        "_last",
        "_lingered",
        "_newest",
        "_queue",
        "_task",
        "deadline",
        "payload",
        "phase",
        "reserved",
        "server",
    )

    def __init__(self, server: "HttpServer", loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._parser = make_parser(self, loop)
        self._queue: deque[Incoming] = deque()
        self._newest: StreamReader = EMPTY_PAYLOAD
        self._task: asyncio.Task[None] | None = None
        self._broken: Answer | None = None
        self._last = False
        self._head_bytes = self._lingered = self.reserved = 0
        self.server = server
        self.payload: StreamReader = EMPTY_PAYLOAD
        self.phase = Phase.IDLE
        self.deadline = FOREVER

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.deadline = self._loop.time() + self.server.timeouts.head
        refusal = self.server.add(self)
        if refusal is not None:
            self._finish(refusal)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._fail_body(ClientGone())
        self._parser = None
        self._queue.clear()
        if self._task is None:
            self.server.remove(self)

    def eof_received(self) -> bool:
        """The client sends no more. It may still wait for an answer to what it sent in full."""
        self._fail_body(Refused(problems.INCOMPLETE_BODY, "The connection ended before the body did."))
        self._last = True
        return self._task is not None and self.phase is not Phase.LINGER

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        if self.phase is Phase.LINGER or self._broken is not None:
            self._discard(data)
            return
        try:
            requests, upgraded, _ = self._parser.feed_data(data)
            if self._head_bytes + len(data) > MAX_HEAD_BYTES:
                check_heads(requests)
        except HttpProcessingError as error:
            self._break(explain(error))
            return
        if requests:
            self._head_bytes = 0
            self._last = self._last or upgraded
            self._newest = requests[-1][1]
            self._queue.extend(requests)
            if self._task is None:
                self._task = self._loop.create_task(self._serve())
                self.server.active += 1
            if len(self._queue) >= MAX_PIPELINED and not self._buffer_paused:
                self._pause_reading_for_buffer()
        elif data and self._task is None:
            self._await_head(len(data))

    def resume_reading(self, resume_parser: bool = True) -> None:
        """The parser asks for this at the end of every body; nearly always nothing was paused."""
        if self._reading_paused:
            super().resume_reading(resume_parser)

    # What the server calls.

    def wait(self, phase: Phase, seconds: float) -> None:
        """Enter a phase that may last so long."""
        self.phase, self.deadline = phase, self._loop.time() + seconds

    def expire(self) -> None:
        """The deadline passed."""
        if self.phase is Phase.HEAD:
            self._finish(refuse(Refused(problems.TOO_SLOW, "The head of the request did not arrive in time.")))
        elif self.phase is Phase.BODY:
            self.deadline = FOREVER
            self._fail_body(Refused(problems.TOO_SLOW, "The body did not arrive in time."))
        else:
            self.abort()

    def drain(self) -> None:
        """No new requests: ends now, or after the answers under way."""
        self._last = True
        if self._task is None and self.phase is not Phase.LINGER and self.transport is not None:
            self.transport.close()

    def abort(self) -> None:
        """Ends now, whatever is under way."""
        if self._task is not None:
            self._task.cancel()
        if self.transport is not None:
            self.transport.abort()

    # Our own.

    def _await_head(self, size: int) -> None:
        if self.phase is not Phase.HEAD:
            self.wait(Phase.HEAD, self.server.timeouts.head)
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._finish(refuse(Refused(problems.HEAD_TOO_LARGE, f"At most {MAX_HEAD_BYTES} bytes are allowed.")))

    def _fail_body(self, error: Exception) -> None:
        """The body that is still arriving never will; whoever reads it gets the error."""
        if not self._newest.is_eof():
            self._newest.set_exception(error)

    def _break(self, refused: Refused) -> None:
        """What came is not HTTP. Complete requests before it still get their answers; then this is the last one."""
        if self._task is None:
            self._finish(refuse(refused))
            return
        self._broken = refuse(refused)
        self._fail_body(refused)

    async def _serve(self) -> None:
        """Handle what is queued. Owned by this connection; ends when the queue is empty or the connection ends."""
        try:
            while self._queue and self.phase is not Phase.LINGER:
                await self._serve_one(*self._queue.popleft())
            if self._broken is not None and self.phase is not Phase.LINGER:
                self._finish(self._broken)
        except (ClientGone, ConnectionError):
            pass  # nobody is left to answer
        except Exception as error:
            log.exception("a connection failed", kind=type(error).__name__, exc_info=error)
            if self.transport is not None:
                self.transport.abort()
        finally:
            self._task = None
            self._release()
            self.server.active -= 1
            if self.transport is None:
                self.server.remove(self)
            elif self.phase is not Phase.LINGER:
                self.wait(Phase.IDLE, self.server.timeouts.idle)

    async def _serve_one(self, message: RawRequestMessage, payload: StreamReader) -> None:
        self.phase, self.deadline, self.payload = Phase.HANDLING, FOREVER, payload
        if self._parser is not None:
            self._parser.message_consumed()
        if self._buffer_paused:
            self._refill()
        answer = await self.server.respond(message, self)
        self._release()
        ends = answer.close or message.should_close or message.version is not HttpVersion11
        if ends or not payload.is_eof() or (self._last and not self._queue):
            self._finish(answer, head_only=message.method == "HEAD")
            return
        if self.transport is None:
            raise ClientGone
        self.transport.write(answer.render(close=False, date=self.server.date, head_only=message.method == "HEAD"))
        if self._paused:
            self.wait(Phase.ANSWERING, ANSWER_S)
            await self._drain_helper()

    def _release(self) -> None:
        self.server.release(self.reserved)
        self.reserved = 0

    def _refill(self) -> None:
        """Parse what was held back, and read on when there is room."""
        self.data_received(b"")
        if len(self._queue) < MAX_PIPELINED:
            self._resume_reading_for_buffer()

    def _finish(self, answer: Answer, *, head_only: bool = False) -> None:
        """The last answer of this connection."""
        transport = self.transport
        if transport is None:
            return
        self._queue.clear()
        transport.write(answer.render(close=True, date=self.server.date, head_only=head_only))
        self.wait(Phase.LINGER, LINGER_S)
        has_all = self._task is not None and self._newest.is_eof() and self._broken is None
        if has_all or not transport.can_write_eof():
            transport.close()
            return
        transport.write_eof()
        self._resume_transport_reading()

    def _discard(self, data: bytes) -> None:
        self._lingered += len(data)
        if self._lingered > LINGER_BYTES:
            self.abort()
