"""The API's description: `openapi.json` beside this file. Tests hold it against the code."""

from pathlib import Path

FILE = Path(__file__).with_name("openapi.json")


def load_openapi() -> bytes:
    """The document as it is served. Blocking: reads a file of some 20 KB."""
    return FILE.read_bytes()
