"""Host names to addresses, on threads of its own: a name server that does not answer delays only its own host.

The event loop's own resolver shares four threads among everything; a few slow names would stop all lookups.
"""

import asyncio
import errno
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from services.core.net_guard import NetPolicy, refuse_address

MAX_THREADS = 64
LOOKUP_TIMEOUT = 5.0
"""Seconds. A thread cannot be stopped and may wait longer; it is then the one thread of its host."""

AddressInfo = tuple[Any, Any, int, str, Any]
Lookup = Callable[..., list[AddressInfo]]


class RefusedAddress(OSError):
    """The address of this destination may not be reached (see `net_guard`)."""


class NameNotFound(OSError):
    """The host name has no address, as far as could be found out in time."""


class Lookups:
    """`getaddrinfo` for all destinations. At most one thread per host, MAX_THREADS in all, none of which delays the exit."""

    def __init__(self, lookup: Lookup = socket.getaddrinfo) -> None:
        self._lookup = lookup
        self._running: dict[str, asyncio.Future[list[AddressInfo]]] = {}

    async def find(self, host: str) -> list[AddressInfo]:
        """TCP addresses of the host, at least one. Raises NameNotFound, also after LOOKUP_TIMEOUT seconds, and OSError."""
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
        except (socket.gaierror, UnicodeError) as error:
            result = NameNotFound(f"the name cannot be looked up: {error}")
        except OSError as error:
            result = error
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
            found.set_exception(NameNotFound("the name has no address"))
        else:
            found.set_result(result)


def _consume(found: "asyncio.Future[list[AddressInfo]]") -> None:
    """An error that came after everybody had given up is not a forgotten one."""
    if not found.cancelled():
        found.exception()


async def find_addresses(lookups: Lookups, host: str, port: int, policy: NetPolicy) -> list[AddressInfo]:
    """Where to connect for a host, at least one; an address written as a number is looked up as it is, by nobody.

    Refuses a name when any of its addresses is refused: which one a client tries first is up to the name's owner. Raises
    RefusedAddress, NameNotFound, OSError.
    """
    try:
        found = [_as_info(ip_address(host))]
    except ValueError:
        found = await lookups.find(host)
    for *_, address in found:
        if (reason := refuse_address(address[0], port, policy)) is not None:
            raise RefusedAddress(f"the host leads inside: {reason}")
    return [
        (family, kind, proto, name, (address[0], port, *address[2:])) for family, kind, proto, name, address in found
    ]


def _as_info(address: IPv4Address | IPv6Address) -> AddressInfo:
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    return family, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (str(address), 0)
