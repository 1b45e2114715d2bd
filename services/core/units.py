"""Durations and sizes as text in files, flags and variables, always with a unit.

`500ms`, `10s`, `5m`, `75h`, `7d` -> seconds; `512B`, `64KB`, `1MB`, `2GiB` -> bytes (KB = 1000, KiB = 1024).
"""

import re
from typing import Annotated

from pydantic import BeforeValidator, WithJsonSchema

_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_NUMBER = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)\s*([A-Za-z]+)")


def _parse(text: object, units: dict[str, float] | dict[str, int], what: str, example: str) -> float:
    match = _NUMBER.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None or match[2] not in units:
        raise ValueError(f"{what} with a unit is needed ({', '.join(units)}). Try: {example}")
    value = float(match[1]) * units[match[2]]
    if value <= 0:
        raise ValueError(f"{what} must be more than zero. Try: {example}")
    return value


def parse_duration(text: object) -> float:
    """Seconds, > 0. Raises ValueError for anything without a unit, negative or zero."""
    return _parse(text, _SECONDS, "a duration", "10s or 7d")


def parse_size(text: object) -> int:
    """Bytes, > 0. Raises ValueError for anything without a unit, negative or zero."""
    return int(_parse(text, _BYTES, "a size", "1MB"))


def format_duration(seconds: float) -> str:
    """In the largest unit that gives a whole number: 90.0 -> 90s, 0.05 -> 50ms."""
    return _format(round(seconds * 1000), {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1000, "ms": 1})


def format_size(size: int) -> str:
    """In the largest unit that gives a whole number: 1000000 -> 1MB, 1024 -> 1KiB."""
    return _format(size, {unit: _BYTES[unit] for unit in ("GB", "GiB", "MB", "MiB", "KB", "KiB", "B")})


def format_count(count: int, noun: str) -> str:
    """As in `1 event` and `2,800 events`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _format(amount: int, units: dict[str, int]) -> str:
    unit = next((unit for unit, worth in units.items() if amount and amount % worth == 0), list(units)[-1])
    return f"{amount // units[unit]}{unit}"


DURATION_PATTERN = r"^\d{1,12}(\.\d{1,6})?\s*(ms|s|m|h|d)$"
SIZE_PATTERN = r"^\d{1,12}(\.\d{1,6})?\s*(B|KB|MB|GB|KiB|MiB|GiB)$"

Duration = Annotated[
    float, BeforeValidator(parse_duration), WithJsonSchema({"type": "string", "pattern": DURATION_PATTERN})
]
"""A field in seconds, given as text like `10s`; its default in code is a float of seconds."""

Size = Annotated[int, BeforeValidator(parse_size), WithJsonSchema({"type": "string", "pattern": SIZE_PATTERN})]
"""A field in bytes, given as text like `1MB`; its default in code is an int of bytes."""
