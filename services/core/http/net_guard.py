"""Allows webhooks to public addresses, and to private ones only if the operator allows it (server-side request forgery).

Two checks have the same rules: `check_destination_url` when a pipe file is loaded, and `refuse_address` for every socket at
connect time, so that changed answers for a name (DNS rebinding) are checked, too. Sources of the ranges: the IANA
special-purpose address registries (RFC 6890 and its successors).
"""

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from services.core.http.address import parse_address

IpAddress = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_SPECIAL_V4 = {
    IPv4Network(text): kind
    for text, kind in (
        ("0.0.0.0/8", "this host"),
        ("10.0.0.0/8", "private"),
        ("100.64.0.0/10", "shared"),
        ("127.0.0.0/8", "loopback"),
        ("168.63.129.16/32", "cloud metadata"),  # a public number that is reachable only inside of that cloud
        ("169.254.0.0/16", "link-local or cloud metadata"),
        ("172.16.0.0/12", "private"),
        ("192.0.0.0/24", "special"),
        ("192.0.2.0/24", "documentation"),
        ("192.88.99.0/24", "6to4 relay"),
        ("192.168.0.0/16", "private"),
        ("198.18.0.0/15", "benchmarking"),
        ("198.51.100.0/24", "documentation"),
        ("203.0.113.0/24", "documentation"),
        ("224.0.0.0/4", "multicast"),
        ("240.0.0.0/4", "reserved"),
    )
}
_LOOPBACK_V4 = IPv4Network("127.0.0.0/8")
_PUBLIC_V6 = IPv6Network("2000::/3")
"""Global unicast. All other addresses are private or special: ::1, fc00::/7, fe80::/10, fec0::/10, NAT64, multicast …"""
_SPECIAL_V6 = tuple(IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"))
"""Within 2000::/3: Teredo and other protocol assignments, documentation, 6to4."""
_NAT64 = (IPv6Network("64:ff9b::/96"), IPv6Network("64:ff9b:1::/48"))

_PRINTABLE = re.compile(r"[!-\[\]-~]+")
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/?#]*)(?P<rest>[^#]*)")
_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>\d{1,5}))?")
_NUMERIC_LABEL = re.compile(r"\d+|0[xX][0-9A-Fa-f]*")


@dataclass(frozen=True, slots=True)
class NetPolicy:
    """The operator's rules. allow: private networks that may be reached.

    own: (host, port) of our own ingest, which is never a destination: that would be a loop. A loopback or unspecified host
    there means every loopback address.
    """

    allow: tuple[Network, ...] = ()
    own: tuple[tuple[str, int], ...] = ()


def parse_networks(text: str) -> tuple[Network, ...]:
    """From comma-separated CIDRs, or "". Raises ValueError, whose message is for a person."""
    found: list[Network] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        try:
            found.append(ip_network(part))
        except ValueError:
            raise ValueError(f"{part!r} is not a network. Try: 127.0.0.0/8,10.1.0.0/16") from None
    return tuple(found)


def parse_endpoints(text: str) -> tuple[tuple[str, int], ...]:
    """From comma-separated host:port, or "". Raises ValueError, whose message is for a person."""
    found: list[tuple[str, int]] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        host, port = parse_address(part)
        found.append((_plain(host), port))
    return tuple(found)


def check_destination_url(url: str, policy: NetPolicy) -> str | None:
    """The reason why this URL may not be a destination, for a person, without the URL; None when it may. Resolves no name."""
    if not _PRINTABLE.fullmatch(url):
        return "only printable ASCII without spaces and backslashes. Try: percent-encode paths, xn--… for names"
    match = _URL.fullmatch(url)
    if match is None or match["scheme"].lower() not in ("http", "https"):
        return "a URL with http:// or https:// and without #fragment is needed. Try: https://example.com/hook"
    if "@" in match["authority"]:
        return "user and password in a URL are refused. Try: a signing secret, which proves the sender"
    parts = _AUTHORITY.fullmatch(match["authority"])
    if parts is None:
        return "the host is not valid. Try: https://example.com/hook"
    port = int(parts["port"]) if parts["port"] else (443 if match["scheme"].lower() == "https" else 80)
    if not 1 <= port <= 65535:
        return "the port must be 1 to 65535"
    return _check_host(parts["host"], port, policy)


def is_loopback_url(url: str) -> bool:
    """Whether requests to this URL stay on this machine. Resolves no name."""
    match = _URL.fullmatch(url)
    parts = _AUTHORITY.fullmatch(match["authority"]) if match else None
    if parts is None:
        return False
    host = _plain(parts["host"])
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host.split(".")[-1] == "localhost"


def _check_host(host: str, port: int, policy: NetPolicy) -> str | None:
    """Check the host of the URL. The addresses of a name are checked when it is connected to."""
    if host.startswith("["):
        try:
            return refuse_address(str(IPv6Address(host[1:-1])), port, policy)
        except ValueError:
            return "the IPv6 address is not valid"
    name = _plain(host)
    labels = name.split(".")
    if _NUMERIC_LABEL.fullmatch(labels[-1]):
        try:
            return refuse_address(str(IPv4Address(host)), port, policy)
        except ValueError:
            return "IPv4 addresses are four decimal numbers without leading zeros. Try: 192.0.2.10"
    if not _is_name(host, labels):
        return "the host name is not valid. Try: https://example.com/hook"
    if (name, port) in policy.own:
        return "is our own ingest: a loop"
    if labels[-1] == "localhost":
        return refuse_address("127.0.0.1", port, policy)
    return None


def _is_name(host: str, labels: Sequence[str]) -> bool:
    """Whether it has labels of 1 to 63 characters, and at most one dot at its end (the root's)."""
    return not host.endswith("..") and len(host) <= 254 and all(1 <= len(label) <= 63 for label in labels)


def refuse_address(address: str, port: int, policy: NetPolicy) -> str | None:
    """The reason to refuse a connection to this address, for a person; None to allow it. address: as from getaddrinfo."""
    try:
        parsed: IpAddress = ip_address(address.partition("%")[0])
    except ValueError:
        return f"{address!r} is not an address"
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped  # the kernel connects to this address
    if any(own_port == port and _is_same(parsed, host) for host, own_port in policy.own):
        return f"{address}:{port} is our own ingest: a loop"
    kind = _refused_kind(parsed, policy)
    if kind is None:
        return None
    needed = [parsed, *filter(None, [_embedded(parsed)])]
    networks = ",".join("127.0.0.0/8" if one in _LOOPBACK_V4 else str(ip_network(one)) for one in needed)
    return f"{address} is {kind}. Try: --allow-networks {networks}, if this destination is meant"


def _refused_kind(address: IpAddress, policy: NetPolicy) -> str | None:
    """The kind of a refused address; None when it is allowed."""
    if any(address.version == network.version and address in network for network in policy.allow):
        inner = _embedded(address)
        return None if inner is None else _refused_kind(inner, policy)
    if isinstance(address, IPv4Address):
        return next((kind for network, kind in _SPECIAL_V4.items() if address in network), None)
    if address.is_loopback:
        return "loopback"
    if address not in _PUBLIC_V6 or any(address in network for network in _SPECIAL_V6):
        return "private, local or special"
    return None


def _embedded(address: IpAddress) -> IPv4Address | None:
    """The IPv4 address in a translating IPv6 address (NAT64, 6to4). It must be allowed, too."""
    if isinstance(address, IPv4Address):
        return None
    if any(address in network for network in _NAT64):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.sixtofour


def _is_same(address: IpAddress, own: str) -> bool:
    try:
        host: IpAddress = ip_address("127.0.0.1" if own == "localhost" else own)
    except ValueError:
        return False
    if host.is_unspecified:  # listens on every address of this machine
        return address.is_loopback or address.is_unspecified or _is_local(address)
    if host.is_loopback:
        return address.is_loopback or address.is_unspecified or address == host
    return address == host


def _is_local(address: IpAddress) -> bool:
    """Whether it is an address of this machine: only to those can a socket be bound."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((str(address), 0))
        except OSError:
            return False
    return True


def _plain(host: str) -> str:
    """The host in lower case, without brackets and the root's dots."""
    return host.strip("[]").rstrip(".").lower()
