"""Offset tokens: how far a client, or a table, knows a stream. `0:12,3:40` or `0:12,3:40@1764257000000`.

`partition:offset` of the last record, for some partitions; of the others nothing is known. Behind the @: the time, in ms, up to
which everything is known. A client that comes back later than tombstones are kept has perhaps missed some.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

MAX_TOKEN_BYTES = 8192
_TOKEN = re.compile(r"(?:(\d{1,4}:\d{1,19}(?:,\d{1,4}:\d{1,19})*)?)(?:@(\d{1,15}))?")


class Token(NamedTuple):
    """ends: by partition, the offset of the last record. at_ms: None without a time."""

    ends: dict[int, int]
    at_ms: int | None = None


def parse_token(text: str) -> Token | None:
    """None when it is no token. Of a partition that is named twice the higher offset counts."""
    match = _TOKEN.fullmatch(text) if len(text) <= MAX_TOKEN_BYTES else None
    if match is None:
        return None
    ends: dict[int, int] = {}
    for part in match[1].split(",") if match[1] else ():
        partition, _, offset = part.partition(":")
        ends[int(partition)] = max(int(offset), ends.get(int(partition), 0))
    return Token(ends, None if match[2] is None else int(match[2]))


def format_token(nexts: Mapping[int, int], at_ms: int | None = None) -> str:
    """nexts: by partition, the offset behind the last record; 0: there is none yet."""
    ends = ",".join([f"{partition}:{offset - 1}" for partition, offset in sorted(nexts.items()) if offset])
    return ends if at_ms is None else f"{ends}@{at_ms}"
