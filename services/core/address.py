"""Where a server listens, as people write it: host:port, IPv6 in brackets."""

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator

_ADDRESS = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s\[\]:/]+)):(?P<port>[0-9]{1,5})")
MAX_PORT = 65_535


def parse_address(text: str) -> tuple[str, int]:
    """Host (without brackets) and port, 0 to 65535. Raises ValueError for a person."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > MAX_PORT:
        raise ValueError("host:port is needed. Try: 127.0.0.1:8080, or [::1]:8080")
    return match["six"] or match["host"], int(match["port"])


def is_loopback(host: str) -> bool:
    """Whether a host, as text, can be reached from this machine only. Names other than localhost count as reachable."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _checked(text: str) -> str:
    parse_address(text)
    return text


Address = Annotated[str, AfterValidator(_checked)]
"""A field that `parse_address` can read."""
