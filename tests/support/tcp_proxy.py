"""A TCP proxy that makes a link slow, thin, silent or broken, on command."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

_PIECE = 16_384


@dataclass
class TcpProxy:
    """Between clients of `port` and the target. The knobs may be turned at any time and count for running connections.

    delay: seconds added to each piece, each way. bytes_per_s: per connection and direction; None: as fast as it goes.
    Cleared, `answers` holds back everything that the target says; `refuses` ends new connections at once.
    """

    target: tuple[str, int]
    port: int = 0
    delay: float = 0.0
    bytes_per_s: float | None = None
    refuses: bool = False
    answers: asyncio.Event = field(default_factory=asyncio.Event)
    connections: int = 0
    _open: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set["asyncio.Task[None]"] = field(default_factory=set)

    def cut(self) -> None:
        """Reset every connection. New ones are taken."""
        for writer in list(self._open):
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, to its end."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        self.connections += 1
        onward: asyncio.StreamWriter | None = None
        try:
            if self.refuses:
                return
            answers, onward = await asyncio.open_connection(*self.target)
            self._open.add(onward)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, onward, held=False))
                group.create_task(self._pump(answers, writer, held=True))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            return
        finally:
            for end in (writer, onward):
                if end is not None:
                    self._open.discard(end)
                    end.transport.abort()
            self._tasks.discard(task)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, held: bool) -> None:
        while piece := await source.read(_PIECE):
            if self.delay:
                await asyncio.sleep(self.delay)
            if self.bytes_per_s is not None:
                await asyncio.sleep(len(piece) / self.bytes_per_s)
            if held:
                await self.answers.wait()
            sink.write(piece)
            await sink.drain()
        sink.write_eof()

    async def close(self) -> None:
        """End every connection and wait until it is over."""
        self.cut()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


@asynccontextmanager
async def open_proxy(host: str, port: int, *, listen: int = 0) -> AsyncIterator[TcpProxy]:
    """A proxy to host:port on loopback; `listen` 0 takes any free port."""
    proxy = TcpProxy((host, port))
    proxy.answers.set()
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", listen)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.close()
