"""Host names to addresses, on threads of its own: a name server that does not answer delays only its own host.

The event loop's own resolver shares four threads among everything; a few slow names would stop all lookups.
"""

import asyncio
import errno
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiohttp.abc import AbstractResolver, ResolveResult

from services.core.net_guard import NetPolicy, refuse_address

MAX_THREADS = 64
LOOKUP_TIMEOUT = 5.0
"""Seconds. A thread cannot be stopped and may wait longer; it is then the one thread of its host."""

AddressInfo = tuple[Any, Any, int, str, Any]
Lookup = Callable[..., list[AddressInfo]]


class RefusedAddress(OSError):
    """The address of this destination may not be reached (see `net_guard`)."""


class Lookups:
    """`getaddrinfo` for all destinations. At most one thread per host, MAX_THREADS in all, none of which delays the exit."""

    def __init__(self, lookup: Lookup = socket.getaddrinfo) -> None:
        self._lookup = lookup
        self._running: dict[str, asyncio.Future[list[AddressInfo]]] = {}

    async def find(self, host: str) -> list[AddressInfo]:
        """TCP addresses of the host, at least one. Raises OSError, also after LOOKUP_TIMEOUT seconds."""
        found = self._running.get(host)
        if found is None:
            found = self._start(host)
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT):
                return await asyncio.shield(found)
        except TimeoutError:
            raise OSError(f"the name was not found within {LOOKUP_TIMEOUT:.0f} s") from None

    def _start(self, host: str) -> "asyncio.Future[list[AddressInfo]]":
        if len(self._running) >= MAX_THREADS:
            raise OSError(errno.ENOBUFS, f"{MAX_THREADS} names are being looked up already and none is answered")
        found: asyncio.Future[list[AddressInfo]] = asyncio.get_running_loop().create_future()
        found.add_done_callback(_consume)
        try:
            threading.Thread(target=self._run, args=(host, found), name=f"dns {host}", daemon=True).start()
        except RuntimeError as error:
            raise OSError(errno.ENOMEM, f"no thread could be started: {error}") from None
        self._running[host] = found
        return found

    def _run(self, host: str, found: "asyncio.Future[list[AddressInfo]]") -> None:
        """On the thread."""
        result: list[AddressInfo] | OSError
        try:
            result = self._lookup(host, None, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        except (OSError, UnicodeError) as error:
            result = error if isinstance(error, OSError) else OSError(f"the name cannot be looked up: {error}")
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            found.get_loop().call_soon_threadsafe(self._finish, host, found, result)

    def _finish(
        self, host: str, found: "asyncio.Future[list[AddressInfo]]", result: list[AddressInfo] | OSError
    ) -> None:
        self._running.pop(host, None)
        if found.done():
            return
        if isinstance(result, OSError):
            found.set_exception(result)
        elif not result:
            found.set_exception(OSError("the name has no address"))
        else:
            found.set_result(result)


def _consume(found: "asyncio.Future[list[AddressInfo]]") -> None:
    """An error that came after everybody had given up is not a forgotten one."""
    if not found.cancelled():
        found.exception()


class GuardedResolver(AbstractResolver):
    """Refuses a name when any of its addresses is refused: which one a client tries first is up to the name's owner."""

    def __init__(self, lookups: Lookups, policy: NetPolicy) -> None:
        self._lookups, self._policy = lookups, policy

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """Raises RefusedAddress, OSError."""
        found: list[ResolveResult] = []
        for kind, _, proto, _, address in await self._lookups.find(host):
            if (reason := refuse_address(address[0], port, self._policy)) is not None:
                raise RefusedAddress(f"the host name leads inside: {reason}")
            if family in (socket.AF_UNSPEC, kind):
                found.append(
                    ResolveResult(hostname=host, host=address[0], port=port, family=kind, proto=proto, flags=0)
                )
        return found

    async def close(self) -> None:
        """Nothing to release."""
