"""A receiver's port that is opened, closed, and opened again."""

import socket
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from services.fleet.receiver import Receiver, serve_receiver


class Doorway:
    """While it is closed connections are refused, and nobody else gets the port. An async context manager; it begins open."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._listening = AsyncExitStack()
        self._held = socket.socket()
        self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._held.bind(("127.0.0.1", 0))
        self.port: int = self._held.getsockname()[1]
        self.is_open = False

    async def open(self) -> None:
        """Take requests."""
        await self._listening.enter_async_context(serve_receiver(self._receiver, "127.0.0.1", self.port))
        self.is_open = True

    async def close(self) -> None:
        """Refuse connections; those that exist are closed once their request is answered."""
        self.is_open = False
        await self._listening.aclose()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()
        self._held.close()
