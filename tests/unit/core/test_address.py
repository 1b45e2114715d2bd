"""host:port as operators write it."""

import pytest

from services.core.http.address import is_loopback_authority, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:8080", "127.0.0.1", 8080),
        ("localhost:0", "localhost", 0),
        ("[::1]:65535", "::1", 65535),
        ("ingest.example.org:80", "ingest.example.org", 80),
    ],
)
def test_it_is_taken_apart(text: str, host: str, port: int) -> None:
    """Broken: a service listens elsewhere than it says."""
    assert parse_address(text) == (host, port)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8080",
        ":8080",
        "host:",
        "host:x",
        "host:65536",
        "host:-1",
        "host:²",
        "host:٣",
        "::1:80",
        "[::1]",
        "[]:1",
        "h h:1",
        "http://h:1",
        "h:1\n",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    """Broken: a typing error ends in a traceback, or in a port that nobody meant ("²" is a digit to str.isdigit)."""
    with pytest.raises(ValueError, match=r"Try: 127\.0\.0\.1:8080"):
        parse_address(text)


@pytest.mark.parametrize(
    ("authority", "ours"),
    [
        ("localhost", True),
        ("LocalHost:8080", True),
        ("127.0.0.1", True),
        ("127.9.9.9:1", True),
        ("[::1]:8080", True),
        ("localhost:", True),
        ("", False),
        ("evil.example", False),
        ("evil.example:8080", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evil@localhost", False),
        ("localhost@evil.example", False),
        ("localhost:80:80", False),
        ("localhost, evil.example", False),
        ("[::1", False),
        ("[::ffff:9.9.9.9]", False),
        ("0.0.0.0", False),
        ("2130706433", False),
        ("localhost/", False),
        ("localhost" * 100, False),
    ],
)
def test_only_names_that_nobody_else_can_give_this_machine_are_ours(authority: str, ours: bool) -> None:
    """Broken: a page on the web whose name was made to mean 127.0.0.1 talks to a server that asks nobody who they are."""
    assert is_loopback_authority(authority) is ours
