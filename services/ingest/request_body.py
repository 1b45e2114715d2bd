"""Reading a request's body: bounded in size and time. Its connection counts it against what this process may hold at once."""

from aiohttp.http import RawRequestMessage

from services.ingest import problems
from services.ingest.connection import FOREVER, Connection, Phase
from services.ingest.http_answer import CONTINUE
from services.ingest.problems import Refused


async def read_body(connection: Connection, message: RawRequestMessage, limit: int) -> bytes:
    """The body of the request under way, at most `limit` bytes.

    Raises Refused: too large, too slow, incomplete, or too much under way in this process. Raises ClientGone.
    """
    payload = connection.payload
    if payload.is_eof():
        body: bytes = payload.read_nowait()
        if len(body) > limit:
            raise _too_large(limit)
        connection.server.check_room()
        return body
    if int(message.headers.get("Content-Length", "0")) > limit:
        raise _too_large(limit)
    connection.server.check_room()
    _expect(connection, message)
    connection.wait(Phase.BODY, connection.server.timeouts.body)
    try:
        return await _read_chunks(connection, limit)
    finally:
        connection.phase, connection.deadline = Phase.HANDLING, FOREVER


async def _read_chunks(connection: Connection, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while chunk := await connection.payload.readany():
        chunks.append(chunk)
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        connection.server.check_room()
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
