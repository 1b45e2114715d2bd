"""Resolves host names on its own threads: a name server that does not answer delays only its own hosts.

The event loop's resolver shares a few threads among all hosts, so some slow names would stop every lookup.
"""

import asyncio
import errno
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from services.core.http.net_guard import NetPolicy, refuse_address

MAX_THREADS = 64
LOOKUP_TIMEOUT = 5.0
"""Seconds. A thread cannot be stopped and may wait longer. Until it ends, its host gets no other thread."""

AddressInfo = tuple[Any, Any, int, str, Any]
Lookup = Callable[..., list[AddressInfo]]


class RefusedAddress(OSError):
    """Webhooks may not connect to this address (see `net_guard`)."""


class NameNotFound(OSError):
    """The host name has no address, or the lookup did not end in time."""


class Resolver:
    """`getaddrinfo` for all destinations: at most one thread per host and MAX_THREADS together. No thread delays the exit."""

    def __init__(self, lookup: Lookup = socket.getaddrinfo) -> None:
        self._lookup = lookup
        self._running: dict[str, asyncio.Future[list[AddressInfo]]] = {}

    async def resolve(self, host: str) -> list[AddressInfo]:
        """TCP addresses of the host, at least one. Raises NameNotFound (also after LOOKUP_TIMEOUT seconds) and OSError."""
        found = self._running.get(host)
        if found is None:
            found = self._start(host)
        try:
            async with asyncio.timeout(LOOKUP_TIMEOUT):
                return await asyncio.shield(found)
        except TimeoutError:
            raise NameNotFound(f"the name was not found within {LOOKUP_TIMEOUT:.0f} s") from None

    def _start(self, host: str) -> "asyncio.Future[list[AddressInfo]]":
        if len(self._running) >= MAX_THREADS:
            raise OSError(errno.ENOBUFS, f"{MAX_THREADS} lookups of names have no answer yet")
        found: asyncio.Future[list[AddressInfo]] = asyncio.get_running_loop().create_future()
        found.add_done_callback(_retrieve_error)
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
        except (socket.gaierror, UnicodeError) as error:
            result = NameNotFound(f"the name cannot be looked up: {error}")
        except OSError as error:
            result = error
        with suppress(RuntimeError):  # the loop is closed: nothing waits for the result
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
            found.set_exception(NameNotFound("the name has no address"))
        else:
            found.set_result(result)


def _retrieve_error(found: "asyncio.Future[list[AddressInfo]]") -> None:
    """Otherwise asyncio logs an error that came after every caller had timed out."""
    if not found.cancelled():
        found.exception()


async def find_addresses(resolver: Resolver, host: str, port: int, policy: NetPolicy) -> list[AddressInfo]:
    """The addresses to connect to, at least one. A numeric address needs no lookup.

    A name is refused when any of its addresses is refused, because the name's owner decides which one a client tries first.
    Raises RefusedAddress, NameNotFound, OSError.
    """
    try:
        found = [_as_info(ip_address(host))]
    except ValueError:
        found = await resolver.resolve(host)
    for *_, address in found:
        if (reason := refuse_address(address[0], port, policy)) is not None:
            raise RefusedAddress(f"the host has a refused address: {reason}")
    return [
        (family, kind, proto, name, (address[0], port, *address[2:])) for family, kind, proto, name, address in found
    ]


def _as_info(address: IPv4Address | IPv6Address) -> AddressInfo:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    return family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (str(address), 0)
