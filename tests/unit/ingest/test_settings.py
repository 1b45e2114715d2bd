"""Settings of ingest: what an operator may get wrong, and the one combination that would open the door."""

import pytest

from services.core.process.settings import load_settings
from services.core.yaml_source import BadConfiguration
from services.ingest.settings import IngestSettings


def settings(*flags: str) -> IngestSettings:
    return load_settings(IngestSettings, flags, {})


@pytest.mark.parametrize("listen", ["127.0.0.1:8080", "127.9.9.9:1", "[::1]:8080", "localhost:0"])
def test_loopback_needs_no_keys(listen: str) -> None:
    """A newcomer's first try."""
    host, port = settings("--listen", listen).address()
    assert f"{host}:{port}" == listen.replace("[", "").replace("]", "")


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:8080", "[::]:8080", "10.0.0.1:80", "example.org:80", "127.0.0.1.nip.io:80"]
)
def test_any_other_address_needs_keys(listen: str) -> None:
    """An open port without keys lets anybody write; the error says what to do."""
    with pytest.raises(BadConfiguration, match=r"listen.*penstock keys create"):
        settings("--listen", listen).address()
    settings("--listen", listen, "--keys", "keys.yaml").address()


@pytest.mark.parametrize("listen", ["", "8080", ":8080", "host:", "host:x", "host:70000", "127.0.0.1"])
def test_a_bad_address_is_named(listen: str) -> None:
    """Before anything is opened."""
    with pytest.raises(BadConfiguration, match="host:port"):
        settings("--listen", listen).address()


@pytest.mark.parametrize(
    "flags",
    [
        ("--max-body", "5"),
        ("--max-body", "0MB"),
        ("--body-timeout", "30"),
        ("--max-events", "0"),
        ("--max-events", "100000"),
        ("--max-connections", "0"),
        ("--reuse-port", "maybe"),
    ],
)
def test_values_without_unit_or_out_of_range_are_named(flags: tuple[str, str]) -> None:
    """`30` may be seconds or minutes; nobody should have to guess."""
    with pytest.raises(BadConfiguration, match=flags[0]):
        settings(*flags)


def test_units_are_read() -> None:
    """Sizes in bytes, durations in seconds."""
    found = settings("--max-body", "2MB", "--max-event", "64KiB", "--body-timeout", "500ms", "--reuse-port", "false")
    assert (found.max_body, found.max_event, found.body_timeout, found.reuse_port) == (2_000_000, 65_536, 0.5, False)
