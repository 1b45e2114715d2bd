"""Clients that pipeline and read nothing: each sends as much as the other side takes, and takes next to no answers."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.support.raw_http import make_request

QUESTIONS = [*range(16), *range(60, 140, 2)]
"""Each client sends another number of them: where the system's buffers for the answers end is not for us to say."""
BODIES = 8
BODY_BYTES = 500_000
_BUFFER_BYTES = 16_384
_PUSH_BYTES = 200_000


def make_wire(stream: str, questions: int) -> bytes:
    """What one client sends: questions with long answers, then large bodies, which are no events."""
    event = b"x" * BODY_BYTES
    question = make_request("/openapi.json", method="GET", media=None)
    return question * questions + make_request(f"/v1/streams/{stream}/events", event) * BODIES


class Flood:
    """`clients` connections to a port of this machine. `sent`: bytes that the system took; `ended`: connections that ended."""

    def __init__(self, port: int, clients: int, stream: str) -> None:
        self._port, self._clients = port, clients
        self._wires = [memoryview(make_wire(stream, questions)) for questions in QUESTIONS]
        self._open: dict[socket.socket, memoryview] = {}
        self.sent = self.ended = 0

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """They are connected and send until the context is left."""
        loop = asyncio.get_running_loop()
        pushing = None
        try:
            for number in range(self._clients):
                client = socket.socket()
                self._open[client] = self._wires[number % len(self._wires)]
                client.setblocking(False)
                for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                    client.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
                await loop.sock_connect(client, ("127.0.0.1", self._port))
            pushing = asyncio.create_task(self._push())
            yield
        finally:
            if pushing is not None:
                pushing.cancel()
                with suppress(asyncio.CancelledError):
                    await pushing
            for client in self._open:
                client.close()

    async def _push(self) -> None:
        while True:
            for client in list(self._open):
                self._push_one(client)
            await asyncio.sleep(0.01)

    def _push_one(self, client: socket.socket) -> None:
        rest = self._open[client]
        if not rest:
            return
        try:
            count = client.send(rest[:_PUSH_BYTES])
        except BlockingIOError:
            return
        except OSError:
            self.ended += 1
            client.close()
            del self._open[client]
            return
        self.sent += count
        self._open[client] = rest[count:]

    async def until_still(self) -> None:
        """Until nothing more was taken, and no connection ended, for some time."""
        async with asyncio.timeout(300):
            before = None
            while before != (self.sent, self.ended):
                before = self.sent, self.ended
                await asyncio.sleep(2)
