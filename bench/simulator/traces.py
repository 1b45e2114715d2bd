"""The traffic: how much is asked for at each moment, and how it falls on the slots of a stream."""

import dataclasses
import math
from collections.abc import Callable, Sequence
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
    one slot, which means nothing to a group. seed: of the noise."""

    name: str
    seconds: float
    load: Callable[[float], float]
    hot: Callable[[float], float] | None = None
    seed: int = 1

    def steps(self) -> "list[tuple[float, Floats]]":
        """(second, load of each slot) of every step. The same for each policy: the seed decides."""
        random = np.random.default_rng(self.seed)
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
    away = (at / HOUR_S - hour + 12) % 24 - 12
    return math.exp(-0.5 * (away / width_hours) ** 2)


def _ramp(at: float, first_hour: float, last_hour: float) -> float:
    """0 before, 1 behind, a straight line between."""
    return min(1.0, max(0.0, (at / HOUR_S - first_hour) / (last_hour - first_hour)))


Peak = tuple[float, float, float]
"""Height in shards, hour of the day, width in hours."""


def day(base: float, peaks: Sequence[Peak]) -> Trace:
    """Three days alike."""
    return Trace(
        "a day with peaks",
        3 * DAY_S,
        lambda at: base + sum(height * _bell(at, hour, width) for height, hour, width in peaks),
    )


def crowd(
    base: float, times: float, hour: float, rise_minutes: float, stays_hours: float, leaves_hours: float
) -> Trace:
    """Many come at once, stay, and go more slowly."""
    gone = hour + stays_hours

    def load(at: float) -> float:
        here = _ramp(at, hour, hour + rise_minutes / 60) - _ramp(at, gone, gone + leaves_hours)
        return base * (1.0 + (times - 1.0) * here)

    return Trace(f"a flash crowd x{times:.0f}", DAY_S, load)


def hot_key(base: float, extra: float, first_hour: float, last_hour: float) -> Trace:
    """A steady load, and one partition that gets more from an hour to another."""

    def hot(at: float) -> float:
        return extra * (_ramp(at, first_hour, first_hour + 1 / 6) - _ramp(at, last_hour, last_hour + 1 / 6))

    return Trace("a hot key", DAY_S, lambda _at: base, hot)


def growth(base: float, times: float) -> Trace:
    """By the same factor each hour of two days."""
    return Trace("slow growth", 2 * DAY_S, lambda at: base * times ** (at / (2 * DAY_S)))


TRACES = (
    day(4.0, [(8.0, 10, 1.5), (16.0, 20, 1.0)]),
    crowd(3.0, 10.0, 12.0, 2.0, 1.0, 0.5),
    hot_key(12.0, 0.6, 8.0, 18.0),
    growth(2.0, 8.0),
)
"""Those that the rules' numbers were chosen on."""


def draw_unseen(seed: int) -> tuple[Trace, ...]:
    """One of each kind whose numbers nobody chose: drawn from the seed, and the noise with them."""
    random = np.random.default_rng([seed, 7])
    some = random.uniform
    peaks = [(some(3, 20), some(0, 24), some(0.75, 3)) for _ in range(int(random.integers(1, 4)))]
    first = some(1, 12)
    drawn = (
        day(some(2, 10), peaks),
        crowd(some(1, 6), some(4, 12), some(2, 16), some(1, 10), some(0.25, 4), some(0.1, 1)),
        hot_key(some(5, 25), some(0.3, 0.8), first, first + some(1, 11)),
        growth(some(1, 5), some(2, 8)),
    )
    return tuple(dataclasses.replace(trace, seed=seed) for trace in drawn)
