"""Offset tokens: how far a client, or a table, knows a compacted stream. Ingest makes them, and the table service reads them.

`9f86d081.0:12,3:40` or `9f86d081.0:12,3:40@1764257000000`. In front of the dot is a mark of the topic: a topic that was deleted
and created again has other events at these offsets. Then come `partition:offset` of the last record, for some partitions; of the
others nothing is known. Behind the @: the time, in ms, up to which everything is known. A client that comes back later than
tombstones are kept has perhaps missed some. The empty token is the beginning of whatever topic there is.
"""

import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

MAX_TOKEN_BYTES = 8192
_TOKEN = re.compile(r"([0-9a-f]{8})\.(\d{1,4}:\d{1,19}(?:,\d{1,4}:\d{1,19})*)?(?:@(\d{1,15}))?")


class Token(NamedTuple):
    """topic: its mark; "" in the empty token. ends: by partition, the offset of the last record. at_ms: None without a time."""

    topic: str
    ends: dict[int, int]
    at_ms: int | None = None


def mark_of(incarnation: str) -> str:
    """The mark of a topic. incarnation: as the broker's administration gives it."""
    return blake2b(incarnation.encode(), digest_size=4).hexdigest()


def parse_token(text: str) -> Token | None:
    """None when it is no token. Of a partition that is named twice the higher offset counts."""
    if not text:
        return Token("", {})
    match = _TOKEN.fullmatch(text) if len(text) <= MAX_TOKEN_BYTES else None
    if match is None:
        return None
    ends: dict[int, int] = {}
    for part in match[2].split(",") if match[2] else ():
        partition, _, offset = part.partition(":")
        ends[int(partition)] = max(int(offset), ends.get(int(partition), 0))
    return Token(match[1], ends, None if match[3] is None else int(match[3]))


def format_token(topic: str, nexts: Mapping[int, int], at_ms: int | None = None) -> str:
    """topic: the mark. nexts: by partition, the offset behind the last record; 0: there is none yet."""
    ends = ",".join([f"{partition}:{offset - 1}" for partition, offset in sorted(nexts.items()) if offset])
    return f"{topic}.{ends}" if at_ms is None else f"{topic}.{ends}@{at_ms}"
