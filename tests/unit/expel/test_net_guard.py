"""The SSRF guard: broken, a pipe file's author reaches the machine's own services or the cloud's credentials."""

import re

import pytest

from services.core.http.net_guard import (
    NetPolicy,
    check_destination_url,
    parse_endpoints,
    parse_networks,
    refuse_address,
)

STRICT = NetPolicy()
LOCAL = NetPolicy(allow=parse_networks("127.0.0.0/8, ::1/128"), own=parse_endpoints("127.0.0.1:8080"))

INSIDE_URLS = [
    "http://127.0.0.1/",
    "http://127.8.9.1:81/x",
    "http://10.0.0.1/",
    "http://172.16.0.1/",
    "http://192.168.1.1/",
    "http://100.64.0.1/",
    "http://0.0.0.0/",
    "http://255.255.255.255/",
    "http://224.0.0.1/",
    "http://169.254.169.254/latest/meta-data",
    "http://168.63.129.16/",
    "http://192.0.0.192/",
    "http://100.100.100.200/",
    "http://198.18.0.1/",
    "http://[::1]/",
    "http://[::]/",
    "http://[::ffff:7f00:1]/",
    "http://[::ffff:10.0.0.1]/",
    "http://[64:ff9b::7f00:1]/",
    "http://[64:ff9b:1::a00:1]/",
    "http://[2002:7f00:1::]/",
    "http://[2001:0:1:2::1]/",
    "http://[fec0::1]/",
    "http://[fc00::1]/",
    "http://[fd00:ec2::254]/",
    "http://[fe80::1]/",
    "http://[ff02::1]/",
    "http://[2001:db8::1]/",
    "http://localhost/",
    "http://LOCALHOST:80/",
    "http://localhost./",
    "http://a.localhost/",
    "http://2130706433/",
    "http://0x7f000001/",
    "http://0x7f.1/",
    "http://017700000001/",
    "http://0177.0.0.1/",
    "http://127.1/",
    "http://127.0.1/",
    "http://127.0.0.1./",
    "http://0/",
    "http://\uff11\uff12\uff17.0.0.1/",
    "http://127\u30020\u30020\u30021/",
    "http://[fe80::1%25eth0]/",
]

BROKEN_URLS = [
    "",
    "example.com",
    "//example.com/",
    "file:///etc/passwd",
    "ftp://example.com/",
    "gopher://example.com/",
    "javascript:alert(1)",
    "http:///x",
    "http://user:pw@example.com/",
    "http://user@example.com/",
    "http://example.com@127.0.0.1/",
    "http://example.com\\@127.0.0.1/",
    "http://example.com/\r\nX: y",
    "http://example.com/ x",
    "http://example.com/\x00",
    "http://exa%6dple.com/",
    "http://example.com:0/",
    "http://example.com:65536/",
    "http://example.com:-1/",
    "http://example..com/",
    "http://" + "a" * 64 + ".com/",
    "http://[::1/",
    "http://[1.2.3.4]/",
    "http://[zz]/",
    "http://example.com/#x",
    "http://1.2.3.4.5/",
    "http://1.2.3.256/",
]


@pytest.mark.parametrize("url", INSIDE_URLS + BROKEN_URLS)
def test_refused(url: str) -> None:
    """Broken: this spelling of an inside address, or this malformed URL, gets through the check of the pipe file."""
    assert check_destination_url(url, STRICT) is not None


@pytest.mark.parametrize("url", BROKEN_URLS)
def test_malformed_urls_are_refused_even_when_everything_is_allowed(url: str) -> None:
    """Broken: allow_networks opens more than networks."""
    assert check_destination_url(url, NetPolicy(allow=parse_networks("0.0.0.0/0,::/0"))) is not None


@pytest.mark.parametrize(
    "url",
    [
        "https://example.com/hook",
        "http://EXAMPLE.com.:8443/a/b?c=d&e=%20f",
        "https://8.8.8.8/",
        "https://[2606:4700::1111]:444/",
        "https://xn--bcher-kva.example/",
        "https://under_score.example.com",
    ],
)
def test_public_urls_pass(url: str) -> None:
    """Broken: an ordinary receiver cannot be used."""
    assert check_destination_url(url, STRICT) is None


@pytest.mark.parametrize("url", ["http://127.0.0.1:9000/", "http://localhost:9000/", "http://[::1]:9000/"])
def test_operator_allows(url: str) -> None:
    """Broken: the demo and tests cannot deliver on one machine."""
    assert check_destination_url(url, LOCAL) is None
    assert check_destination_url(url, STRICT) is not None


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8080/", "http://localhost:8080/v1", "http://127.0.0.2:8080/", "http://[::1]:8080/"]
)
def test_own_ingest_is_a_loop(url: str) -> None:
    """Broken: a pipe feeds itself for ever."""
    assert "loop" in (check_destination_url(url, LOCAL) or "")


def test_own_ingest_by_name_is_a_loop() -> None:
    """Broken: the loop is missed when ingest is known by its public name."""
    policy = NetPolicy(own=parse_endpoints("ingest.example.com:443"))
    assert "loop" in (check_destination_url("https://Ingest.Example.com./v1", policy) or "")
    assert check_destination_url("https://ingest.example.com:8443/", policy) is None


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "::ffff:127.0.0.1", "fe80::1%eth0", "64:ff9b::a00:1", "junk"])
def test_addresses_at_connect(address: str) -> None:
    """Broken: a name that resolves to an inside address (rebinding) is connected to."""
    assert refuse_address(address, 80, STRICT) is not None


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.1.2.3", "::1", "::ffff:127.0.0.1", "fe80::1%eth0", "64:ff9b::a00:1"]
)
def test_the_hint_allows_the_address(address: str) -> None:
    """Broken: an operator follows the hint, and the address is refused again."""
    hint = re.search(r"Try: --allow-networks (\S+),", refuse_address(address, 80, STRICT) or "")
    assert hint is not None
    assert refuse_address(address, 80, NetPolicy(allow=parse_networks(hint[1]))) is None


def test_allowed_translation_still_checks_the_address_inside() -> None:
    """Broken: allowing NAT64 for public receivers opens the IPv4 loopback behind it."""
    policy = NetPolicy(allow=parse_networks("64:ff9b::/96"))
    assert refuse_address("64:ff9b::808:808", 443, policy) is None
    assert refuse_address("64:ff9b::7f00:1", 443, policy) is not None


@pytest.mark.parametrize("text", ["127.0.0.1/8", "x", "10.0.0.0/33", "1.2.3.4:80"])
def test_bad_networks_are_named(text: str) -> None:
    """Broken: a typing error in allow_networks is ignored or a stack trace."""
    with pytest.raises(ValueError, match="Try"):
        parse_networks(text)


def test_messages_do_not_repeat_credentials() -> None:
    """Broken: a password in a URL ends in the logs."""
    assert "hunter2" not in (check_destination_url("https://u:hunter2@example.com/", STRICT) or "")


def test_own_ingest_on_every_address_is_a_loop_at_each_of_them() -> None:
    """Broken: a pipe posts to its own machine's ingest by another of its addresses, and multiplies its events for ever."""
    policy = NetPolicy(allow=parse_networks("127.0.0.0/8,192.0.2.0/24"), own=parse_endpoints("0.0.0.0:8080"))
    assert "loop" in (refuse_address("127.0.0.3", 8080, policy) or "")
    assert refuse_address("192.0.2.1", 8080, policy) is None  # reserved for documentation: no machine's own
