"""HTTP clients of the simulated ingest: real bytes, over connections in memory, to any process that listens."""

import asyncio
import random
import socket
from collections.abc import Callable, Sequence
from typing import Any

from services.core.http.client import BadResponse, ResponseReader
from tests.simulation.machine import Machine, Process
from tests.simulation.oracle import Event, Oracle, payload
from tests.simulation.rotation import Rotation
from tests.support.oracle import Fate

CLIENT_TIMEOUT_S = 30.0


class _Socket:
    """What a transport in memory shows for a socket."""

    family = socket.AF_UNIX

    def setsockopt(self, *_: int) -> None:
        """There is no kernel that keeps anything."""


class MemoryTransport(asyncio.Transport):
    """One direction of a connection; what is written arrives some milliseconds later, in order."""

    def __init__(self, machine: Machine, delay: Callable[[], float]) -> None:
        super().__init__()
        self._machine, self._delay = machine, delay
        self.receiver: Any = None
        self.context: Any = None
        self._closing = False
        self._last = 0.0

    def _later(self, callback: Any, *args: Any) -> None:
        self._last = max(self._last + 1e-6, self._machine.time() + self._delay())
        self._machine.call_at(self._last, callback, *args, context=self.context)

    def write(self, data: Any) -> None:
        """As there."""
        if not self._closing:
            self._later(self.receiver.data_received, bytes(data))

    def close(self) -> None:
        """As there."""
        if not self._closing:
            self._closing = True
            self._later(self.receiver.connection_lost, None)

    def abort(self) -> None:
        """As there."""
        self.close()

    def can_write_eof(self) -> bool:
        """As there."""
        return False

    def is_closing(self) -> bool:
        """As there."""
        return self._closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """As there."""
        return _Socket() if name == "socket" else default

    def pause_reading(self) -> None:
        """Nothing is read ahead."""

    def resume_reading(self) -> None:
        """As there."""

    def get_write_buffer_size(self) -> int:
        """As there: the network takes everything at once."""
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""


class _Client(asyncio.Protocol):
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.answer: asyncio.Future[tuple[int, bytes]] = loop.create_future()
        self._reader = ResponseReader()

    def data_received(self, data: bytes) -> None:
        if self.answer.done():
            return
        try:
            if self._reader.feed(data):
                self._resolve()
        except BadResponse as error:
            self.answer.set_exception(ConnectionError(str(error)))

    def _resolve(self) -> None:
        found = self._reader.response
        assert found is not None
        self.answer.set_result((found.status, found.body))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.answer.done():
            if self._reader.feed_eof():
                self._resolve()
            else:
                self.answer.set_exception(ConnectionResetError())


async def post(
    machine: Machine, process: Process, path: str, body: bytes, token: str, delay: Callable[[], float]
) -> tuple[int, bytes]:
    """(status, body). Raises OSError when there is no answer; the process may have done what it was asked all the same."""
    client = _Client(machine)
    factory = process.listeners[0]
    out, back = MemoryTransport(machine, delay), MemoryTransport(machine, delay)
    server = process.context.run(factory)
    out.receiver, out.context = server, process.context
    back.receiver = client
    process.context.run(server.connection_made, back)

    def reset() -> None:
        if not client.answer.done():
            machine.call_later(delay(), client.connection_lost, None)

    process.on_death.append(reset)
    fields = ["Host: 127.0.0.1:8080", "Content-Type: application/json", f"Content-Length: {len(body)}"]
    fields += [f"Authorization: Bearer {token}"] if token else []
    out.write("\r\n".join((f"POST {path} HTTP/1.1", *fields, "", "")).encode() + body)
    try:
        async with asyncio.timeout(CLIENT_TIMEOUT_S):
            return await client.answer
    finally:
        process.on_death.remove(reset)
        out.close()


class Senders:
    """Clients that each send events of keys of their own, one request at a time.

    `listening` gives the processes that take requests. gives_up: how often a client does not send an event again.
    """

    def __init__(
        self,
        machine: Machine,
        rng: random.Random,
        oracle: Oracle,
        listening: Callable[[], Sequence[Process]],
        rotation: Rotation,
        streams: Sequence[str],
        *,
        gives_up: float,
    ) -> None:
        self._gives_up = gives_up
        self._machine, self._rng, self._oracle, self._listening = machine, rng, oracle, listening
        self._rotation, self._streams = rotation, streams
        self.requests = 0

    async def run(self, client: int, until: float, pace: float, batch: int) -> None:
        """Send until that time, then see to what is still open."""
        waiting: list[Event] = []
        tries = 0
        while self._machine.time() < until or (waiting and tries < 30):
            if not waiting:
                await asyncio.sleep(self._rng.expovariate(1 / pace))
                waiting = self._issue(client, batch)
                tries = 0
            tries += 1
            await self.send(waiting)
            waiting = [event for event in waiting if event.fate in (Fate.UNKNOWN, Fate.DENIED)]
            if waiting:
                if self._rng.random() < self._gives_up:
                    waiting = []
                    continue
                await asyncio.sleep(self._rng.uniform(0.1, 2.0))

    def _issue(self, client: int, batch: int) -> list[Event]:
        stream = self._rng.choice(self._streams)
        keys = [f"k{client}-{number}" for number in range(2)]
        return [self._oracle.issue(stream, self._rng.choice(keys)) for _ in range(self._rng.randint(1, batch))]

    async def send(self, events: Sequence[Event]) -> None:
        """One request, to whoever listens."""
        listening = self._listening()
        if not listening:
            await asyncio.sleep(0.3)
            return
        self.requests += 1
        before = [event.fate for event in events]
        self._oracle.sending(events, self._machine.time())
        body = b"[" + b",".join(map(payload, events)) + b"]"
        process = self._rng.choice(listening)
        token, sent_at = self._rotation.token, self._machine.time()
        path = f"/v1/streams/{events[0].stream}/events"
        try:
            delay = lambda: self._rng.choice((0.0, 0.001))  # noqa: E731 - a parameter of one call
            status, text = await post(self._machine, process, path, body, token, delay)
        except OSError:
            self._machine.trace(f"{events[0].id}+{len(events)} -> {process.name}: no answer")
            return
        self._machine.trace(f"{events[0].id}+{len(events)} -> {process.name}: {status}")
        self._rotation.judge_answer(token, sent_at, status)
        self._oracle.answered(events, before, status, text)
