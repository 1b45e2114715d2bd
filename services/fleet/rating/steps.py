"""How the load is raised, and what the steps say: pure functions.

The load grows by half until it is not kept pace with; then the gap between the last rate that was and the first that was not is
halved twice. A step that was not kept is tried once more: a disk may stand still for a moment.
"""

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
"""What uses so much of a core, or of all, has none left."""
HEADROOM = 0.75
"""The target as a share of the plateau: what is left takes a step of load while new instances start."""


@dataclass(frozen=True, slots=True)
class Step:
    """One step of so many seconds. rate, made, done: events a second that were wanted, that reached its input, that it did.

    lag: how late the work was at the end, in s. cpu: cores that the instance used; source_cpu: cores that making the load used.
    machine: share of all cores that was used, by whomever.
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
        """Whether the instance kept pace: nearly all is done or not late yet."""
        under_way = self.lag * self.rate / self.seconds
        return self.lag <= KEPT_LAG_SHARE * self.seconds and self.done + under_way >= KEPT_SHARE * self.rate


@dataclass(frozen=True, slots=True)
class Rating:
    """rate: the most events a second that one instance kept pace with, 0.0 when it never did.

    plateau_cpu: the most cores that it took. target_cpu: what to aim at, below that.
    limit: what ended the steps: the instance; the machine, which could make no more load, or had no core left though the instance
    used less than one; none when there were no more steps.
    """

    rate: float
    plateau_cpu: float
    target_cpu: float
    limit: Limit


def next_rate(steps: Sequence[Step], first: float) -> float | None:
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


def rate_of(steps: Sequence[Step]) -> Rating:
    """What the steps say."""
    plateau = max((step.cpu for step in steps), default=0.0)
    rate = max((step.rate for step in steps if step.kept), default=0.0)
    return Rating(rate, plateau, round(max(0.01, plateau * HEADROOM), 2), _limit(steps, plateau))


def _limit(steps: Sequence[Step], plateau: float) -> Limit:
    kept = {step.rate for step in steps if step.kept}
    lost = [step for step in steps if step.rate not in kept]  # a step that was kept at the second try says nothing
    if not lost:
        return "none"
    short = all(max(step.source_cpu, step.machine) >= FULL_CORE or step.made < KEPT_SHARE * step.rate for step in lost)
    return "machine" if short and plateau < FULL_CORE else "instance"
