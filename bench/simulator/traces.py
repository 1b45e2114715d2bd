"""The traffic: how much is asked for at each moment, and how it falls on the slots of a stream."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

STEP_S = 15.0
HOUR_S, DAY_S = 3_600.0, 86_400.0
SLOTS = 240
_NOISE = 0.05
"""Standard deviation of each slot's load from step to step; of the slots among each other it is `_UNEVEN`."""

_UNEVEN = 0.3

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trace:
    """name. seconds: how long. load: at a second, in what one shard (one instance) takes. hot: the extra load of
    one slot, which means nothing to a group."""

    name: str
    seconds: float
    load: Callable[[float], float]
    hot: Callable[[float], float] | None = None

    def steps(self, seed: int = 1) -> "list[tuple[float, Floats]]":
        """(second, load of each slot) of every step. The same for each policy: the seed decides."""
        random = np.random.default_rng(seed)
        weights = random.lognormal(0.0, _UNEVEN, SLOTS)
        weights /= weights.sum()
        found = []
        for number in range(int(self.seconds / STEP_S)):
            at = number * STEP_S
            slots = weights * random.normal(1.0, _NOISE, SLOTS).clip(0.5, 1.5) * self.load(at)
            if self.hot is not None:
                slots[SLOTS // 3] += self.hot(at)
            found.append((at, slots))
        return found


def _bell(at: float, hour: float, width_hours: float) -> float:
    return math.exp(-0.5 * ((at % DAY_S / HOUR_S - hour) / width_hours) ** 2)


def _ramp(at: float, first_hour: float, last_hour: float) -> float:
    """0 before, 1 behind, a straight line between."""
    return min(1.0, max(0.0, (at / HOUR_S - first_hour) / (last_hour - first_hour)))


def _day(at: float) -> float:
    return 4.0 + 8.0 * _bell(at, 10, 1.5) + 16.0 * _bell(at, 20, 1.0)


def _crowd(at: float) -> float:
    return 3.0 * (1.0 + 9.0 * (_ramp(at, 12.0, 12.0 + 2 / 60) - _ramp(at, 13.0, 13.5)))


def _hot(at: float) -> float:
    return 0.6 * (_ramp(at, 8.0, 8.0 + 1 / 6) - _ramp(at, 18.0, 18.0 + 1 / 6))


TRACES = (
    Trace("a day with peaks", 3 * DAY_S, _day),
    Trace("a flash crowd x10", DAY_S, _crowd),
    Trace("a hot key", DAY_S, lambda _at: 12.0, _hot),
    Trace("slow growth", 2 * DAY_S, lambda at: 2.0 * 8.0 ** (at / (2 * DAY_S))),
)
