"""What a `kinesis://` URL says: the region, and other endpoints than the region's own (an emulator, a VPC endpoint)."""

import re
from dataclasses import dataclass
from urllib.parse import SplitResult, parse_qsl, urlsplit

_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-[0-9]+")
_ENDPOINTS = ("endpoint", "dynamodb")
_FAN_OUT = "fan_out"
_EXAMPLE = "Try: kinesis://eu-west-1"


@dataclass(frozen=True, slots=True)
class Address:
    """endpoint, dynamodb: http(s)://host:port of Kinesis and of DynamoDB; None: the region's. fan_out: groups read by it."""

    region: str
    endpoint: str | None = None
    dynamodb: str | None = None
    fan_out: bool = False


def parse_address(url: str) -> Address:
    """`kinesis://region[?endpoint=URL&dynamodb=URL&fan_out=1]`. Raises ValueError, which quotes none of it (secrets)."""
    parts = _split(url)
    if parts is None or not _REGION.fullmatch(parts.netloc) or parts.path not in ("", "/"):
        raise ValueError(f"a Kinesis URL needs the name of a region, and no more in front of its options. {_EXAMPLE}")
    found: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in (*_ENDPOINTS, _FAN_OUT):
            options = ", ".join((*_ENDPOINTS, _FAN_OUT))
            raise ValueError(f"a Kinesis URL has no options but {options}. {_EXAMPLE}")
        if name in found:
            raise ValueError(f"{name} stands twice in the Kinesis URL. {_EXAMPLE}")
        if name in _ENDPOINTS:
            _check_endpoint(name, value)
        elif value not in ("0", "1"):
            raise ValueError(f"{name} in a Kinesis URL is 0 or 1. {_EXAMPLE}")
        found[name] = value
    return Address(parts.netloc, found.get("endpoint"), found.get("dynamodb"), found.get(_FAN_OUT) == "1")


def _check_endpoint(name: str, value: str) -> None:
    parts = _split(value)
    if (
        parts is None
        or parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.username
        or parts.path not in ("", "/")
    ):
        raise ValueError(f"{name} in a Kinesis URL is no endpoint. Try: {name}=http://127.0.0.1:4568")


def _split(url: str) -> SplitResult | None:
    """None when it is none: the errors of urllib quote what they could not read."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        return None
    return parts
