"""What a pipe file's destinations may not say; each mistake must be named where it stands."""

from pathlib import Path

import pytest

from services.core.http.net_guard import NetPolicy
from services.core.pipe_file.destination_check import check_destinations, check_header
from services.core.pipe_file.pipes import PipeFile
from services.core.yaml_source import parse_yaml, validate_document

GOOD = """\
streams:
  flights: {}
pipes:
  late:
    sources: [flights]
    destinations:
      - name: hook
        webhook:
          url: https://example.com/hook
          headers:
            X-Team: river
"""


def problems(text: str, environ: dict[str, str] | None = None) -> list[str]:
    document = parse_yaml(text, Path("pipes.yaml"))
    return [str(p) for p in check_destinations(document, validate_document(document, PipeFile), NetPolicy(), environ)]


def test_good_file_has_no_problems() -> None:
    """Broken: an ordinary file is refused."""
    assert problems(GOOD) == []


def test_every_mistake_is_named_with_line_and_key() -> None:
    """Broken: a person searches for the mistake, or finds them one by one."""
    text = GOOD.replace("https://example.com/hook", "http://169.254.169.254/").replace("X-Team: river", "Host: x")
    found = problems(text)
    assert [item.split(": ")[0:2] for item in found] == [
        ["pipes.yaml:9", "pipes.late.destinations[hook].webhook.url"],
        ["pipes.yaml:11", "pipes.late.destinations[hook].webhook.headers.Host"],
    ]


def test_missing_secret_is_named_only_where_secrets_are_needed() -> None:
    """Broken: expel starts unsigned, or checking a file elsewhere needs the secrets."""
    text = GOOD + "          secret: {env: HOOK_SECRET}\n"
    assert problems(text) == []
    (found,) = problems(text, {})
    assert found.startswith("pipes.yaml:12: pipes.late.destinations[hook].webhook.secret: the variable HOOK_SECRET")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Host", "x"),
        ("webhook-id", "x"),
        ("Webhook-Signature", "x"),
        ("Connection", "close"),
        ("Transfer-Encoding", "chunked"),
        ("TE", "trailers"),
        ("Upgrade", "h2c"),
        ("Keep-Alive", "timeout=5"),
        ("Trailer", "X-Sum"),
        ("Proxy-Connection", "close"),
        ("Expect", "100-continue"),
        ("Accept-Encoding", "gzip"),
        ("Proxy-Authorization", "x"),
        ("Content-Length", "0"),
        ("Content-Type", "text/plain"),
        ("X-A", "b\r\nHost: c"),
        ("X-A", "b\x00"),
        ("X-A", "é"),
        ("X A", "b"),
        ("X-A:", "b"),
        ("", "b"),
    ],
)
def test_headers_that_may_not_be_set(name: str, value: str) -> None:
    """Broken: a header smuggles a request, or replaces a signature."""
    assert check_header(name, value) is not None


def test_header_names_differing_in_case_only() -> None:
    """Broken: which of the two is sent depends on chance."""
    assert any("twice" in item for item in problems(GOOD + "            x-team: lake\n"))
