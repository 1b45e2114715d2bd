"""host:port as operators write it."""

import pytest

from services.core.address import parse_address


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
