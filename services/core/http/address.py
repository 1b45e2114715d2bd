"""The address on which a server listens, as text: host:port, IPv6 in brackets."""

import ipaddress
import re
from functools import lru_cache
from typing import Annotated

from pydantic import AfterValidator

_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s\[\]:/]+)):(?P<port>[0-9]{1,5})")
_AUTHORITY = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9.-]+))(?::[0-9]{0,5})?")
MAX_PORT = 65_535
MAX_HOST = 255

LOOPBACK_NAMES = "This server answers only to localhost and to loopback addresses. Use http://127.0.0.1 and its port."
"""The refusal of a request that used another name."""


def parse_address(text: str) -> tuple[str, int]:
    """Host (without brackets) and port, 0 to 65535. Raises ValueError, whose message is for a person."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > MAX_PORT:
        raise ValueError("host:port is needed. Try: 127.0.0.1:8080, or [::1]:8080")
    return match["six"] or match["host"], int(match["port"])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host. Of names only localhost counts as loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@lru_cache(maxsize=64)
def is_loopback_authority(authority: str) -> bool:
    """Whether a Host header (host, or host:port) is localhost or a loopback address.

    A server without authentication refuses other names. Otherwise a foreign page whose name resolves to 127.0.0.1 (DNS
    rebinding) would have the same origin as the server's own pages.
    """
    if len(authority) > MAX_HOST:
        return False
    match = _AUTHORITY.fullmatch(authority)
    return match is not None and is_loopback((match["six"] or match["host"]).lower())


@lru_cache(maxsize=64)
def is_named_authority(authority: str, names: frozenset[str]) -> bool:
    """As `is_loopback_authority`, for a server that other machines reach: any IP address, localhost, or one of `names` (lower
    case). No foreign page has an IP address as its name.
    """
    match = _AUTHORITY.fullmatch(authority) if len(authority) <= MAX_HOST else None
    if match is None:
        return False
    host = (match["six"] or match["host"]).lower().removesuffix(".")
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host in names
    return True


def _checked(text: str) -> str:
    parse_address(text)
    return text


Address = Annotated[str, AfterValidator(_checked)]
"""A field with text that `parse_address` accepts."""


_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


def _host_names(text: str) -> str:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not all(_NAME.fullmatch(name) for name in names):
        raise ValueError("names of hosts without a port are needed. Try: observer,observer.example.org")
    return ",".join(names).lower()


HostNames = Annotated[str, AfterValidator(_host_names)]
"""A field with the names of a server, comma-separated, in lower case."""
