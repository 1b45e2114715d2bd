"""What ingest needs of aiohttp's private parts is as it was when `HttpProtocol` was written."""

import inspect
from pathlib import Path

import aiohttp
from aiohttp.base_protocol import BaseProtocol

from services.ingest import http_framing

READ = "3.14"
FIELDS = {"_loop", "_parser", "_reading_paused", "_buffer_paused"}
METHODS = {
    "_pause_reading_for_buffer": ["self"],
    "_resume_reading_for_buffer": ["self"],
    "_resume_transport_reading": ["self"],
    "_drain_helper": ["self"],
    "resume_reading": ["self", "resume_parser"],
}


def test_aiohttp_is_the_version_that_was_read() -> None:
    """Broken: an upgrade changes flow control under ingest. Read aiohttp/base_protocol.py again, then change READ."""
    assert aiohttp.__version__.rpartition(".")[0] == READ


def test_the_private_parts_are_there() -> None:
    """Broken: ingest fails on its first connection, or never pauses a client."""
    assert set(BaseProtocol.__slots__) >= FIELDS
    for name, parameters in METHODS.items():
        assert list(inspect.signature(getattr(BaseProtocol, name)).parameters) == parameters, name


def test_only_one_file_stands_on_them() -> None:
    """Broken: another file of ingest uses aiohttp's private parts, which the two tests above do not know."""
    folder = Path(http_framing.__file__).parent
    private = FIELDS - {"_loop"} | set(METHODS) - {"resume_reading"}
    users = {path.name for path in folder.glob("*.py") for name in private if f".{name}" in path.read_text()}
    assert users == {"http_framing.py"}
