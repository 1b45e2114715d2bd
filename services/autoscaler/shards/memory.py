"""What a restart must remember, in the stream's tags: the updates of a day, and the day's pattern."""

import math
from collections.abc import Mapping
from dataclasses import replace

from services.autoscaler.shards.figures import QUARTERS, UNKNOWN, DayPattern, StreamMemory, Update
from services.core.broker.resharding import StreamTags

UPDATES, NEWEST, BEFORE, QUARTER = "updates", "day", "day-before", "quarter"

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NOTHING, _STEP = "..", 1.006
"""A load is written as two digits of its logarithm: exact to a third of a percent, up to 90,000 shards."""

_LEAST = 1e-5
_MOST = 20
"""Of updates; a tag has 256 characters."""


def write_updates(memory: StreamMemory, ahead: float = 0.0) -> dict[str, str]:
    """The updates of a day (also of two autoscalers), by the wall clock, which is `ahead` of the clock of decisions."""
    return {UPDATES: " ".join(f"{one.direction[0]}{one.at + ahead:.0f}" for one in memory.updates[-_MOST:]) or "none"}


def write_day(memory: StreamMemory) -> dict[str, str]:
    """192 characters a day."""
    day = memory.day
    newest, before = ("".join(map(_write_one, loads)) for loads in (day.newest, day.before))
    return {NEWEST: newest, BEFORE: before, QUARTER: str(day.quarter)}


def read_memory(texts: Mapping[str, str], now: float = math.inf, ahead: float = 0.0) -> StreamMemory:
    """The memory from its texts. Invalid parts are ignored, but every update counts.

    now: by the clock of decisions; ahead: wall clock minus that clock. An update in the future counts as made now.
    """
    words = [word for word in texts.get(UPDATES, "none").split() if word[1:].isdecimal()]
    updates = [Update(min(now, float(word[1:]) - ahead), "up" if word[0] == "u" else "down") for word in words]
    newest, before = _read(texts.get(NEWEST, "")), _read(texts.get(BEFORE, ""))
    quarter = texts.get(QUARTER, "")
    if newest is None or before is None or not quarter.isdecimal():
        return StreamMemory(tuple(updates))
    return StreamMemory(tuple(updates), (), DayPattern(newest, before, int(quarter)))


def _write_one(load: float) -> str:
    if load == UNKNOWN:
        return _NOTHING
    steps = min(len(_DIGITS) ** 2 - 1, max(0, round(math.log(max(load, _LEAST) / _LEAST, _STEP))))
    return _DIGITS[steps // len(_DIGITS)] + _DIGITS[steps % len(_DIGITS)]


def _read(text: str) -> tuple[float, ...] | None:
    words = [text[at : at + 2] for at in range(0, len(text), 2)]
    if len(words) != QUARTERS or any(word != _NOTHING and not set(word) <= set(_DIGITS) for word in words):
        return None
    return tuple(UNKNOWN if word == _NOTHING else _read_one(word) for word in words)


def _read_one(word: str) -> float:
    return float(_LEAST * _STEP ** (_DIGITS.index(word[0]) * len(_DIGITS) + _DIGITS.index(word[1])))


_SAME_S = 5.0
"""Two updates are further apart."""


class UpdateHistory:
    """Reads and writes one stream's memory. Raises BrokerError kinds. now, ahead: see `read_memory`.

    Updates of another autoscaler are counted, and never overwritten.
    """

    def __init__(self, tags: StreamTags, topic: str) -> None:
        self._tags, self._topic = tags, topic
        self._known: set[str] = set()

    async def read(self, now: float, ahead: float) -> StreamMemory:
        texts = await self._tags.read(self._topic)
        self._known = set(texts.get(UPDATES, "").split())
        return read_memory(texts, now, ahead)

    async def find_unknown(self, memory: StreamMemory, now: float, ahead: float) -> tuple[Update, ...]:
        """Updates that are neither known from the tags nor in this memory."""
        words = (await self._tags.read(self._topic)).get(UPDATES, "").split()
        unknown = [word for word in words if word not in self._known]
        self._known.update(unknown)
        found = read_memory({UPDATES: " ".join(unknown)}, now, ahead).updates
        # After a clock step another autoscaler writes our updates with another time.
        return tuple(one for one in found if all(abs(one.at - old.at) > _SAME_S for old in memory.updates))

    async def write_updates(self, memory: StreamMemory, ahead: float) -> None:
        texts = write_updates(memory, ahead)
        self._known.update(texts[UPDATES].split())  # before the request: without an answer its outcome is unknown
        await self._tags.write(self._topic, texts)
        self._known = set(texts[UPDATES].split())

    async def write_day(self, memory: StreamMemory) -> None:
        await self._tags.write(self._topic, write_day(memory))


def with_updates(memory: StreamMemory, found: tuple[Update, ...]) -> StreamMemory:
    """With these updates, in order of time."""
    return replace(memory, updates=tuple(sorted((*memory.updates, *found), key=lambda one: one.at)))
