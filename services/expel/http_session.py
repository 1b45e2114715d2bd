"""One HTTP client per destination: connections, their number and their waits are never shared with another one."""

import socket
from collections.abc import Mapping

from aiohttp import AddrInfoType, ClientSession, ClientTimeout, DummyCookieJar, TCPConnector

from services.core.net_guard import NetPolicy, refuse_address
from services.expel.dns import GuardedResolver, Lookups, RefusedAddress

_KEEP_ALIVE = 4.0
"""Seconds. Just below the 5 s after which many servers close an idle connection: a request must not meet that close."""
_DNS_TTL = 30
_READ_BUFFER = 4096
"""Little is read of an answer, so little is buffered of an endless one."""


def open_session(
    *, policy: NetPolicy, lookups: Lookups, concurrency: int, timeout: float, headers: Mapping[str, str]
) -> ClientSession:
    """A session with `concurrency` connections that are kept alive; the caller closes it.

    timeout: seconds for one request, from connecting to the end of the answer. No redirects are followed by whoever passes
    `allow_redirects=False`; proxies, cookies and netrc of the environment are never used, answers never decompressed.
    """

    def open_socket(info: AddrInfoType) -> socket.socket:
        """The last gate, which addresses written as numbers in the URL pass too; the resolver never sees those."""
        family, kind, proto, _, address = info
        if (reason := refuse_address(str(address[0]), int(address[1]), policy)) is not None:
            raise RefusedAddress(reason)
        return socket.socket(family, kind, proto)

    connector = TCPConnector(
        limit=concurrency,
        resolver=GuardedResolver(lookups, policy),
        ttl_dns_cache=_DNS_TTL,
        socket_factory=open_socket,
        keepalive_timeout=_KEEP_ALIVE,
    )
    return ClientSession(
        connector=connector,
        timeout=ClientTimeout(total=timeout),
        headers={"Accept-Encoding": "identity", "User-Agent": "penstock", **headers},
        auto_decompress=False,
        trust_env=False,
        cookie_jar=DummyCookieJar(),
        read_bufsize=_READ_BUFFER,
    )
