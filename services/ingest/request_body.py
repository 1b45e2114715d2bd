"""Reading a request's body: bounded in size and time, counted against what this process may hold at once."""

from aiohttp.http import RawRequestMessage

from services.ingest import problems
from services.ingest.connection import FOREVER, Connection, Phase
from services.ingest.http_answer import CONTINUE
from services.ingest.problems import Refused


async def read_body(connection: Connection, message: RawRequestMessage, limit: int) -> bytes:
    """The body of the request under way, at most `limit` bytes. What it holds is released with the answer.

    Raises Refused: too large, too slow, incomplete, or too much under way in this process. Raises ClientGone.
    """
    payload = connection.payload
    if payload.is_eof():
        body: bytes = payload.read_nowait()
        if len(body) > limit:
            raise _too_large(limit)
        reserve(connection, len(body))
        return body
    declared = int(message.headers.get("Content-Length", "0"))
    if declared > limit:
        raise _too_large(limit)
    reserve(connection, declared)
    _expect(connection, message)
    connection.wait(Phase.BODY, connection.server.timeouts.body)
    try:
        return await _read_chunks(connection, limit, declared)
    finally:
        connection.phase, connection.deadline = Phase.HANDLING, FOREVER


def reserve(connection: Connection, size: int) -> None:
    """Hold this many bytes more. Raises Refused when the process holds too many."""
    connection.reserved += size
    connection.server.reserve(size)


async def _read_chunks(connection: Connection, limit: int, reserved: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while chunk := await connection.payload.readany():
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        if size > reserved:
            reserve(connection, size - reserved)
            reserved = size
    return b"".join(chunks)


def _expect(connection: Connection, message: RawRequestMessage) -> None:
    """Tell a client that waits for permission to send its body."""
    expectation = message.headers.get("Expect")
    if expectation is None:
        return
    if expectation.lower() != "100-continue":
        raise Refused(problems.EXPECTATION_FAILED, "Only 100-continue is supported.")
    if connection.transport is not None:
        connection.transport.write(CONTINUE)


def _too_large(limit: int) -> Refused:
    return Refused(problems.BODY_TOO_LARGE, f"At most {limit} bytes are allowed.")
