"""What a `kinesis://` URL says: the region, and other endpoints than the region's own (an emulator, a VPC endpoint)."""

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-[0-9]+")
_OPTIONS = ("endpoint", "dynamodb")
_EXAMPLE = "Try: kinesis://eu-west-1"


@dataclass(frozen=True, slots=True)
class Address:
    """endpoint, dynamodb: http(s)://host:port of Kinesis and of DynamoDB; None: the region's."""

    region: str
    endpoint: str | None = None
    dynamodb: str | None = None


def parse_address(url: str) -> Address:
    """`kinesis://region[?endpoint=URL&dynamodb=URL]`. Raises ValueError."""
    parts = urlsplit(url)
    if not _REGION.fullmatch(parts.netloc) or parts.path not in ("", "/"):
        raise ValueError(f"{url!r}: the name of a region is needed. {_EXAMPLE}")
    found: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in _OPTIONS or name in found:
            raise ValueError(f"{url!r}: {name!r} is no option of a Kinesis URL, or stands twice. {_EXAMPLE}")
        _check_endpoint(url, value)
        found[name] = value
    return Address(parts.netloc, found.get("endpoint"), found.get("dynamodb"))


def _check_endpoint(url: str, value: str) -> None:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.path not in ("", "/"):
        raise ValueError(f"{url!r}: {value!r} is no endpoint. Try: endpoint=http://127.0.0.1:4568")
