"""One connection to a receiver: one request at a time, and its answer."""

import asyncio
import time
from typing import cast

from services.expel.http_answer import Answer, AnswerReader, BadAnswer


class Connection(asyncio.Protocol):
    """`is_open`: another request may be sent. Bytes that nobody asked for close it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._reader: AnswerReader | None = None
        self._answered: asyncio.Future[Answer] | None = None
        self.is_open = False
        self.idle_since = 0.0
        """Monotonic seconds."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.is_open = True

    async def exchange(self, request: list[bytes], deadline: float) -> Answer:
        """Send a request and read its answer until `deadline` (loop time); not to be called before the last one ended.

        Raises TimeoutError, OSError, BadAnswer; but once the status is known and no success, the answer without its body
        says enough. Whatever goes wrong closes the connection.
        """
        reader = self._reader = AnswerReader()
        answered: asyncio.Future[Answer] = self._loop.create_future()
        self._answered = answered
        timer = self._loop.call_at(deadline, self._fail, TimeoutError())
        self._transport.writelines(request)
        try:
            return await answered
        finally:
            timer.cancel()
            self._reader = self._answered = None
            self.idle_since = time.monotonic()
            if not reader.reusable or answered.cancelled() or self._transport.get_write_buffer_size():
                self.close()

    def data_received(self, data: bytes) -> None:
        if self._reader is None or self._answered is None or self._answered.done():
            self.close()
            return
        try:
            if self._reader.feed(data):
                self._finish(self._reader)
        except BadAnswer as error:
            self._fail(error)

    def eof_received(self) -> None:
        self.is_open = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._reader is not None and self._reader.feed_eof():
            self._finish(self._reader)
        else:
            self._fail(exc or ConnectionResetError("the receiver closed the connection without a whole answer"))

    def _finish(self, reader: AnswerReader) -> None:
        if self._answered is not None and not self._answered.done():
            assert reader.answer is not None
            self._answered.set_result(reader.answer)

    def _fail(self, error: Exception) -> None:
        if self._reader is None or self._answered is None or self._answered.done():
            return
        self._reader.reusable = False
        answer = self._reader.answer
        if answer is not None and not 200 <= answer.status < 300:
            self._answered.set_result(answer)
        else:
            self._answered.set_exception(error)

    def close(self) -> None:
        """At once: what was not written yet is thrown away."""
        self.is_open = False
        self._transport.abort()
