"""Chooses the next rate and computes the rating from the steps: pure functions.

The rate grows by half until the instance does not keep pace. Then the gap between the highest rate that was kept and the lowest
that was not is halved twice. A step that was not kept is repeated once, because a disk may pause for a moment.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Limit = Literal["instance", "machine", "none"]

GROWTH = 1.5
REFINEMENTS = 2
MOST_RATES = 24
KEPT_SHARE = 0.95
KEPT_LAG_SHARE = 0.1
MIN_STEP_S = 1.0
FULL_CORE = 0.85
"""From this share on, a core, or the machine, counts as full."""
HEADROOM = 0.75
"""The target as a share of the plateau. The rest absorbs a rise of the load while new instances start."""


@dataclass(frozen=True, slots=True)
class RatingStep:
    """One step of so many seconds. rate, made, done: events per second that were offered, reached the input, were processed.

    lag: the backlog at the end, in s. cpu: cores that the instance used. source_cpu: cores that making the load used.
    machine: the used share of all cores, by all processes.
    """

    rate: float
    seconds: float
    made: float
    done: float
    lag: float
    cpu: float
    source_cpu: float
    machine: float

    @property
    def kept(self) -> bool:
        """Whether the instance kept pace: the lag is small, and nearly all events are done or in flight."""
        under_way = self.lag * self.rate / self.seconds
        return self.lag <= KEPT_LAG_SHARE * self.seconds and self.done + under_way >= KEPT_SHARE * self.rate


@dataclass(frozen=True, slots=True)
class Rating:
    """rate: the most events per second with which one instance kept pace; 0.0 when it never did.

    plateau_cpu: the most cores that it used. target_cpu: the recommended setting, below that.
    limit: the bottleneck. `instance`; `machine`: it could make no more load, or had no core left although the instance used
    less than one; `none`: the steps ended first.
    """

    rate: float
    plateau_cpu: float
    target_cpu: float
    limit: Limit


def next_rate(steps: Sequence[RatingStep], first: float) -> float | None:
    """The next rate to offer; None when the rating is known."""
    if not steps:
        return first
    last = steps[-1]
    if not last.kept and sum(step.rate == last.rate for step in steps) == 1:
        return last.rate
    tried = list(dict.fromkeys(step.rate for step in steps))
    kept = {step.rate for step in steps if step.kept}
    lost = [rate for rate in tried if rate not in kept]
    refined = len(tried) - 1 - tried.index(lost[0]) if lost else 0
    if len(tried) >= MOST_RATES or refined >= REFINEMENTS:
        return None
    most = max(kept, default=0.0)
    return (most + min(lost)) / 2 if lost else most * GROWTH


def rate_of(steps: Sequence[RatingStep]) -> Rating:
    """The rating that follows from the steps."""
    plateau = max((step.cpu for step in steps), default=0.0)
    rate = max((step.rate for step in steps if step.kept), default=0.0)
    return Rating(rate, plateau, round(max(0.01, plateau * HEADROOM), 2), _limit(steps, plateau))


def _limit(steps: Sequence[RatingStep], plateau: float) -> Limit:
    kept = {step.rate for step in steps if step.kept}
    lost = [step for step in steps if step.rate not in kept]  # a rate that was kept at the second try is no limit
    if not lost:
        return "none"
    short = all(max(step.source_cpu, step.machine) >= FULL_CORE or step.made < KEPT_SHARE * step.rate for step in lost)
    return "machine" if short and plateau < FULL_CORE else "instance"


WIDTH = 24
_PARTS = " ▏▎▍▌▋▊▉█"
HEAD = f"{'offered/s':>10} {'done/s':>10} {'lag':>8}  CPU (cores)"


def bar(share: float) -> str:
    """A bar of `WIDTH` characters for a share of 1. Larger shares are cut."""
    eighths = round(min(1.0, max(0.0, share)) * WIDTH * 8)
    return "█" * (eighths // 8) + (_PARTS[eighths % 8] if eighths % 8 else "")


def step_line(step: RatingStep) -> str:
    """The line of one step. The bar is full at one core."""
    mark = "" if step.kept else "  not kept"
    return f"{step.rate:>10,.0f} {step.done:>10,.0f} {step.lag:>6.1f} s  {step.cpu:4.2f} {bar(step.cpu):<{WIDTH}}{mark}"


def summary(service: str, rating: Rating) -> list[str]:
    if rating.rate == 0:
        return [f"One {service} instance did not keep pace with the first step. Try: a lower --first"]
    lines = [f"One {service} instance handles {_round(rating.rate):,} events a second on this machine."]
    if rating.limit == "instance":
        lines.append(
            f"CPU reached {rating.plateau_cpu:.2f} cores. Set a target below that: target_cpu: {rating.target_cpu}"
        )
    elif rating.limit == "machine":
        lines.append("The machine was the limit, by its cores or its disk: the instance may handle more.")
        lines.append(f"From these measurements, target_cpu: {rating.target_cpu}")
    else:
        lines.append(
            f"It was never saturated: it can handle more. From these measurements, target_cpu: {rating.target_cpu}"
        )
    return lines


def _round(rate: float) -> int:
    """Two significant digits: the measurement is not more exact."""
    unit = 10 ** max(0, math.floor(math.log10(rate)) - 1)
    return int(rate // unit * unit)
