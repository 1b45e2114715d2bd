"""The rules of other systems, for whatever has a number: shards or instances. Utilisation is a mean over all of them."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

TARGET = 0.7
"""The utilisation that the rules with a target aim at; ours aims there, too."""


class CountPolicy(Protocol):
    """How many there should be; asked every 15 s with the utilisation of the last 15 s."""

    def __call__(self, used: float, count: int, now: float) -> int: ...


@dataclass(slots=True)
class HorizontalPodAutoscaler:
    """Kubernetes' defaults: every 15 s, 10 % tolerance, at most twice or four more, down by the highest wish of 300 s."""

    wishes: list[tuple[float, int]] = field(default_factory=list)

    def __call__(self, used: float, count: int, now: float) -> int:
        """As `CountPolicy`."""
        ratio = used / TARGET
        wish = count if abs(ratio - 1) <= 0.1 else max(1, math.ceil(count * ratio))
        self.wishes = [(at, one) for at, one in self.wishes if at > now - 300] + [(now, wish)]
        if wish > count:
            return min(wish, max(2 * count, count + 4))
        return min(count, max(one for _, one in self.wishes))


class _Minutes:
    """Means of whole minutes, newest last."""

    def __init__(self) -> None:
        self._open: list[float] = []
        self.means: list[float] = []

    def add(self, used: float) -> bool:
        """Whether a minute is full now."""
        self._open.append(used)
        if len(self._open) < 4:
            return False
        self.means = [*self.means[-14:], sum(self._open) / 4]
        self._open = []
        return True


class TargetTracking:
    """AWS: out after three minutes above the target, in after fifteen below nine tenths of it; 300 s between two steps."""

    def __init__(self) -> None:
        self._minutes, self._acted = _Minutes(), -math.inf

    def __call__(self, used: float, count: int, now: float) -> int:
        """As `CountPolicy`."""
        if not self._minutes.add(used) or now - self._acted < 300:
            return count
        means = self._minutes.means
        wish = max(1, math.ceil(count * means[-1] / TARGET))
        is_high = len(means) >= 3 and min(means[-3:]) > TARGET
        is_low = len(means) >= 15 and max(means) < 0.9 * TARGET
        if (is_high and wish > count) or (is_low and wish < count):
            self._acted = now
            return wish
        return count


class FixedThresholds:
    """The shard scaler of AWS' examples: twice as many after 5 minutes above 75 %, half after 15 minutes below 25 %."""

    def __init__(self) -> None:
        self._minutes = _Minutes()

    def __call__(self, used: float, count: int, now: float) -> int:
        """As `CountPolicy`."""
        if not self._minutes.add(used):
            return count
        means = self._minutes.means
        if len(means) >= 5 and min(means[-5:]) > 0.75:
            self._minutes = _Minutes()
            return 2 * count
        if len(means) >= 15 and max(means) < 0.25:
            self._minutes = _Minutes()
            return max(1, count // 2)
        return count


OTHERS: dict[str, Callable[[], CountPolicy]] = {
    "Kubernetes HPA": HorizontalPodAutoscaler,
    "AWS target tracking": TargetTracking,
    "fixed thresholds": FixedThresholds,
}
