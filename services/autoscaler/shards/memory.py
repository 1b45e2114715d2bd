"""What a restart must not forget, as short texts that are kept with the stream itself."""

import math
from collections.abc import Mapping

from services.autoscaler.shards.day import QUARTERS, UNKNOWN, DayPattern
from services.autoscaler.shards.figures import StreamMemory, Update

UPDATES, NEWEST, BEFORE, QUARTER = "updates", "day", "day-before", "quarter"

_DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NOTHING, _STEP = "..", 1.006
"""A load is written as two digits of its logarithm: to a third of a percent, up to 90,000 shards."""

_LEAST = 1e-5
_MOST = 20
"""Updates: a tag has 256 characters."""


def write_updates(memory: StreamMemory, ahead: float = 0.0) -> dict[str, str]:
    """The updates of a day (of two autoscalers, if need be), by the wall clock, which is `ahead` of theirs."""
    return {UPDATES: " ".join(f"{one.direction[0]}{one.at + ahead:.0f}" for one in memory.updates[-_MOST:]) or "none"}


def write_day(memory: StreamMemory) -> dict[str, str]:
    """The day's pattern: 192 characters a day."""
    day = memory.day
    return {NEWEST: _write(day.newest), BEFORE: _write(day.before), QUARTER: str(day.quarter)}


def read_memory(texts: Mapping[str, str], now: float = math.inf, ahead: float = 0.0) -> StreamMemory:
    """What was written. What cannot be understood is as if it were not there, except that an update always counts.

    now: by the clock of decisions, of which the wall clock is `ahead`. An update of the future was just made: a clock was wrong.
    """
    words = [word for word in texts.get(UPDATES, "none").split() if word[1:].isdecimal()]
    updates = [Update(min(now, float(word[1:]) - ahead), "up" if word[0] == "u" else "down") for word in words]
    newest, before = _read(texts.get(NEWEST, "")), _read(texts.get(BEFORE, ""))
    quarter = texts.get(QUARTER, "")
    if newest is None or before is None or not quarter.isdecimal():
        return StreamMemory(tuple(updates))
    return StreamMemory(tuple(updates), (), DayPattern(newest, before, int(quarter)))


def _write(loads: tuple[float, ...]) -> str:
    return "".join(_write_one(load) for load in loads)


def _write_one(load: float) -> str:
    if load == UNKNOWN:
        return _NOTHING
    steps = min(len(_DIGITS) ** 2 - 1, max(0, round(_log(max(load, _LEAST) / _LEAST))))
    return _DIGITS[steps // len(_DIGITS)] + _DIGITS[steps % len(_DIGITS)]


def _read(text: str) -> tuple[float, ...] | None:
    words = [text[at : at + 2] for at in range(0, len(text), 2)]
    if len(words) != QUARTERS or any(word != _NOTHING and not set(word) <= set(_DIGITS) for word in words):
        return None
    return tuple(UNKNOWN if word == _NOTHING else _read_one(word) for word in words)


def _read_one(word: str) -> float:
    return float(_LEAST * _STEP ** (_DIGITS.index(word[0]) * len(_DIGITS) + _DIGITS.index(word[1])))


def _log(value: float) -> float:
    return math.log(value) / math.log(_STEP)
