"""Destination URLs as an attacker writes them, each with what its host resolves to: where it is refused.

There are two gates: when it is saved, and at connect. The connection is tried even where saving is refused: the second gate may
not lean on the first.
"""

import socket
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from services.core.http import client as http_client
from services.core.http.client import HttpClient
from services.core.http.net_guard import NetPolicy, check_destination_url, parse_endpoints, parse_networks
from services.core.http.resolver import AddressInfo, Lookup, NameNotFound, RefusedAddress, Resolver

OWN = NetPolicy(own=parse_endpoints("8.8.4.4:8080,ingest.example.com:443"))
PUBLIC = "8.8.8.8"


class Row(NamedTuple):
    """saved, connect: a word of the refusal; "" when it passes. answers: of each look-up of a name, in order."""

    url: str
    saved: str
    connect: str
    answers: tuple[tuple[str, ...], ...] = ()


HOST = "host is not valid"
LETTERS = "only printable ASCII"
FOUR = "four decimal numbers"
NEEDED = "is needed"
USER = "user and password"
NO_CLIENT = "no client"
"""There is no host, port or scheme by which a client could be made at all."""

ROWS = [
    # what a receiver usually has
    Row("https://example.com/hook", "", "", ((PUBLIC,),)),
    Row("https://Example.com.:8443/a?b=c", "", "", ((PUBLIC, "2606:4700::1111"),)),
    Row("http://8.8.8.8/", "", ""),
    Row("https://[2606:4700::1111]:444/", "", ""),
    Row("http://[::ffff:8.8.8.8]/", "", ""),
    # loopback and this host
    Row("http://127.0.0.1/", "loopback", "loopback"),
    Row("http://127.255.255.254:81/x", "loopback", "loopback"),
    Row("http://0.0.0.0/", "this host", "this host"),
    Row("http://[::1]/", "loopback", "loopback"),
    Row("http://[::]/", "local or special", "local or special"),
    Row("http://[0:0:0:0:0:0:0:1]/", "loopback", "loopback"),
    Row("http://localhost/", "loopback", "loopback", (("127.0.0.1",),)),
    Row("http://LocalHost.:80/", "loopback", "loopback", (("::1",),)),
    Row("http://app.localhost/", "loopback", "loopback", (("127.0.0.1",),)),
    Row("http://127.0.0.1./", FOUR, "loopback", (("127.0.0.1",),)),
    # mapped, compatible, translated, tunnelled
    Row("http://[::ffff:7f00:1]/", "loopback", "loopback"),
    Row("http://[::ffff:10.0.0.1]/", "private", "private"),
    Row("http://[::127.0.0.1]/", "local or special", "local or special"),
    Row("http://[::ffff:0:7f00:1]/", "local or special", "local or special"),
    Row("http://[64:ff9b::7f00:1]/", "local or special", "local or special"),
    Row("http://[64:ff9b:1::a9fe:a9fe]/", "local or special", "local or special"),
    Row("http://[2002:7f00:1::]/", "local or special", "local or special"),
    Row("http://[2002:a9fe:a9fe::1]/", "local or special", "local or special"),
    Row("http://[2001:0:7f00:1::1]/", "local or special", "local or special"),
    # private, shared, link-local, site-local, multicast, reserved
    Row("http://10.255.0.1/", "private", "private"),
    Row("http://172.31.0.1/", "private", "private"),
    Row("http://192.168.0.1/", "private", "private"),
    Row("http://100.64.0.1/", "shared", "shared"),
    Row("http://198.19.255.255/", "benchmarking", "benchmarking"),
    Row("http://[fc00::1]/", "local or special", "local or special"),
    Row("http://[fec0::1]/", "local or special", "local or special"),
    Row("http://[fe80::1]/", "local or special", "local or special"),
    Row("http://[fe80::1%25eth0]/", HOST, "local or special", (("fe80::1%2",),)),
    Row("http://[fe80::1%eth0]/", HOST, "local or special", (("fe80::1%2",),)),
    Row("http://224.0.0.251/", "multicast", "multicast"),
    Row("http://[ff02::1]/", "local or special", "local or special"),
    Row("http://255.255.255.255/", "reserved", "reserved"),
    Row("http://192.0.2.1/", "documentation", "documentation"),
    Row("http://[2001:db8::1]/", "local or special", "local or special"),
    # metadata
    Row("http://169.254.169.254/latest/meta-data", "metadata", "metadata"),
    Row("http://169.254.170.2/v2/credentials", "metadata", "metadata"),
    Row("http://168.63.129.16/", "metadata", "metadata"),
    Row("http://100.100.100.200/", "shared", "shared"),
    Row("http://192.0.0.192/", "special", "special"),
    Row("http://[fd00:ec2::254]/", "local or special", "local or special"),
    Row("http://[::ffff:a9fe:a9fe]/", "metadata", "metadata"),
    Row("http://metadata.google.internal/", "", "metadata", (("169.254.169.254",),)),
    # other spellings of four numbers: what the system's resolver makes of them is refused, too
    Row("http://2130706433/", FOUR, "loopback"),
    Row("http://0x7f000001/", FOUR, "loopback"),
    Row("http://017700000001/", FOUR, "loopback"),
    Row("http://0x7f.1/", FOUR, "loopback"),
    Row("http://0177.0.0.1/", FOUR, "loopback"),
    Row("http://127.1/", FOUR, "loopback"),
    Row("http://0/", FOUR, "this host"),
    Row("http://2852039166/", FOUR, "metadata"),
    Row("http://\uff11\uff12\uff17.0.0.1/", LETTERS, "loopback", (("127.0.0.1",),)),
    Row("http://\u2460\u2461\u2466.0.0.1/", LETTERS, "loopback", (("127.0.0.1",),)),
    Row("http://127\u30020\u30020\u30021/", LETTERS, "loopback", (("127.0.0.1",),)),
    Row("http://loc\u00adalhost/", LETTERS, "loopback", (("127.0.0.1",),)),
    Row("http://\u24db\u24de\u24d2alhost/", LETTERS, "loopback", (("127.0.0.1",),)),
    Row("http://xn--zckzah.example/", "", "loopback", (("127.0.0.1",),)),
    # names that change or mix their answers
    Row("http://127.0.0.1.nip.example/", "", "loopback", (("127.0.0.1",),)),
    Row("http://rebinds.example/", "", "loopback", ((PUBLIC,), ("127.0.0.1",))),
    Row("http://rebinds6.example/", "", "local or special", ((PUBLIC,), ("::ffff:0:a00:1",))),
    Row("http://mixes.example/", "", "private", ((PUBLIC, "10.0.0.1"),)),
    Row("http://mixes6.example/", "", "local or special", (("2606:4700::1111", "fd00::1"),)),
    Row("http://scoped.example/", "", "local or special", (("fe80::1%3",),)),
    Row("http://intranet/", "", "private", (("10.1.2.3",),)),
    Row("http://nowhere.example/", "", "no address", ((),)),
    # our own ingest
    Row("http://8.8.4.4:8080/v1", "loop", "loop"),
    Row("https://Ingest.Example.com./v1", "loop", "", ((PUBLIC,),)),
    Row("http://ours.example:8080/", "", "loop", (("8.8.4.4",),)),
    # what is no plain URL
    Row("file:///etc/passwd", NEEDED, NO_CLIENT),
    Row("gopher://example.com/", NEEDED, NO_CLIENT),
    Row("//example.com/", NEEDED, NO_CLIENT),
    Row("http:///x", HOST, NO_CLIENT),
    Row("http://user:pw@example.com/", USER, "", ((PUBLIC,),)),
    Row("http://example.com@127.0.0.1/", USER, "loopback"),
    Row("http://example.com:80@127.0.0.1/", USER, "loopback"),
    Row("http://example.com\\@127.0.0.1/", LETTERS, NO_CLIENT),
    Row("http://example.com?@127.0.0.1/", "", "", ((PUBLIC,),)),
    Row("http://example.com/\r\nX: y", LETTERS, "", ((PUBLIC,),)),
    Row("http://example.com/\x00", LETTERS, "", ((PUBLIC,),)),
    Row("http://exa%6dple.com/", HOST, "", ((PUBLIC,),)),
    Row("http://example.com:0/", "port must be", "", ((PUBLIC,),)),
    Row("http://example.com:65536/", "port must be", NO_CLIENT),
    Row("http://example.com:80:81/", HOST, NO_CLIENT),
    Row("http://example.com:/", HOST, "", ((PUBLIC,),)),
    Row("http://example..com/", "host name is not valid", "", ((PUBLIC,),)),
    Row("http://example.com../", "host name is not valid", "", ((PUBLIC,),)),
    Row("http://localhost../", "host name is not valid", "loopback", (("127.0.0.1",),)),
    Row("http://" + "a" * 64 + ".com/", "host name is not valid", "", ((PUBLIC,),)),
    Row("http://[1.2.3.4]/", "IPv6 address is not valid", NO_CLIENT),
    Row("http://[::1/", HOST, NO_CLIENT),
    Row("http://[]/", HOST, NO_CLIENT),
    Row("http://example.com/#x", NEEDED, "", ((PUBLIC,),)),
]
IDS = [f"{number}-{row.url.encode('ascii', 'backslashreplace').decode()[:40]!r}" for number, row in enumerate(ROWS)]


def test_the_table_is_as_long_as_it_was() -> None:
    """Broken: rows were taken away to make the others pass."""
    assert len({row.url for row in ROWS}) == len(ROWS) >= 90


@pytest.mark.parametrize("row", ROWS, ids=IDS)
def test_saved(row: Row) -> None:
    """Broken: a pipe file with this destination is taken, or an ordinary receiver is refused."""
    refusal = check_destination_url(row.url, OWN)
    assert (refusal is None) == (row.saved == ""), refusal
    assert row.saved in (refusal or "")


@pytest.mark.parametrize("row", ROWS, ids=IDS)
async def test_at_connect(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: whatever was saved, a socket is opened to an inside address: by this spelling, or by what the name resolves to."""
    opened: list[str] = []

    async def connect(addresses: list[AddressInfo], *, socket_factory: object, **_options: object) -> socket.socket:
        assert callable(socket_factory)
        for info in addresses:
            socket_factory(info).close()
            opened.append(info[4][0])
        raise ConnectionRefusedError("this test connects to nobody")

    monkeypatch.setattr(http_client, "start_connection", connect)
    monkeypatch.setattr(http_client, "_DNS_TTL", -1.0)  # each attempt asks again
    answers = iter(row.answers)
    try:
        client = HttpClient(row.url, policy=OWN, resolver=Resolver(_resolver(answers)), timeout=30.0, headers={})
    except (ValueError, AssertionError):
        assert row.connect == NO_CLIENT
        return
    assert row.connect != NO_CLIENT
    with client:
        outcomes = [await _attempt(client) for _ in range(max(1, len(row.answers)))]
    assert all(outcome == "" for outcome in outcomes[:-1]), outcomes
    assert (outcomes[-1] == "") == (row.connect == ""), outcomes
    assert row.connect in outcomes[-1]
    assert all(address in {PUBLIC, "2606:4700::1111", "::ffff:808:808", "::ffff:8.8.8.8"} for address in opened)


async def _attempt(client: HttpClient) -> str:
    """The refusal; "" when the connection was tried."""
    try:
        await client.post(b"", b"")
    except (RefusedAddress, NameNotFound) as error:
        return str(error)
    except ConnectionRefusedError:
        return ""
    raise AssertionError("nobody was to be connected to")


def _resolver(answers: Iterator[tuple[str, ...]]) -> Lookup:
    """The row's answers, as getaddrinfo gives them; without any, the system's own for numbers, which asks nobody."""

    def look_up(host: str, _port: None, **_options: object) -> list[AddressInfo]:
        found = next(answers, None)
        if found is None:
            return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        return [
            (socket.AF_INET6 if ":" in one else socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, 0)) for one in found
        ]

    return look_up


@pytest.mark.parametrize("inner", ["127.0.0.1", "169.254.169.254", "10.0.0.1"])
def test_what_an_operator_allows_opens_nothing_behind_it(inner: str) -> None:
    """Broken: with a translating network allowed, the addresses inside that it leads to are open as well."""
    policy = NetPolicy(allow=parse_networks("64:ff9b::/96,2002::/16"))
    number = int.from_bytes(socket.inet_aton(inner))
    assert check_destination_url(f"http://[64:ff9b::{number >> 16:x}:{number & 0xFFFF:x}]/", policy) is not None
    assert check_destination_url(f"http://[2002:{number >> 16:x}:{number & 0xFFFF:x}::1]/", policy) is not None
