"""How large a group should be: a pure function of its rules, its figures and earlier decisions.

Target tracking. The load is the CPU of all warm instances together. The number of instances that it needs at the target is
compared with the size that was *ordered*, so instances that are starting count, and are not ordered twice.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.core.units import Duration

Size = Annotated[int, Field(ge=1, le=1000)]


class GroupRules(BaseModel):
    """How one group is scaled. CPU in cores per instance: 1.0 is one core, fully used. Durations in seconds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max: Size = Field(4, description="Instances at most.")
    min: Size = Field(1, description="Instances at least.")
    fault_tolerance: Size = Field(
        1, description="T: as many instances at least, so that one is left after the loss of T - 1."
    )
    target_cpu: float = Field(
        0.6, gt=0, le=64, allow_inf_nan=False, description="Average CPU of an instance that is aimed at, in cores."
    )
    tolerance: float = Field(
        0.1, ge=0, lt=1, allow_inf_nan=False, description="Share of the target by which the average may be off."
    )
    warm_up: Duration = Field(60.0, description="An instance's CPU does not count before it is so old.")
    cool_down: Duration = Field(30.0, description="Time between two actions; between opposite ones twice as long.")
    calm: Duration = Field(180.0, description="One instance less must have been enough for so long.")
    max_lag: Duration = Field(60.0, description="With more lag than this the group grows although its CPU is low.")

    @model_validator(mode="after")
    def _room(self) -> Self:
        if self.max < self.floor:
            raise ValueError(f"max is {self.max}, but min and fault_tolerance ask for {self.floor}")
        return self

    @property
    def floor(self) -> int:
        return max(self.min, self.fault_tolerance)


@dataclass(frozen=True, slots=True)
class Instance:
    """age: seconds since its process began. cpu: cores used on average since the last measurement. None: unknown."""

    name: str
    ready: bool
    age: float | None
    cpu: float | None
    leaving: bool = False
    """It drains, or was ordered to."""


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """A group at one moment.

    size: the ordered number of instances. lag: age in seconds of the oldest event that waits although its receiver
    works; None: unknown. pressure: events in per event delivered, 1.0 when the group keeps pace. under_way: a deploy
    or rebalance that must not be disturbed, in words; None: none.
    """

    size: int
    instances: tuple[Instance, ...]
    lag: float | None = None
    pressure: float = 1.0
    under_way: str | None = None


Action = Literal["out", "in", "hold"]
Reason = Literal[
    "cpu",  # out: the average is above the target; hold: it is within the tolerance
    "lag",  # out: too much lag although CPU is low; hold: too much lag to shrink
    "below_min",
    "calm",  # in: one fewer was enough for the whole window
    "above_max",
    "at_max",
    "at_min",
    "cool_down",
    "warming",  # an instance is starting, silent or draining
    "under_way",  # a deploy or a rebalance
    "not_calm",
    "no_figures",
]

_ROUNDING = 1e-9
"""Of a share of cores, for sums of floats."""


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """What the policy remembers. Times are of the caller's clock, in seconds.

    last, acted_at: the last action. since: figures are complete from then on. needs: (time, instances needed),
    strictly falling: the first is the highest need within the window.
    """

    last: Literal["out", "in"] | None = None
    acted_at: float = 0.0
    since: float | None = None
    needs: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """The size to order, the present one for `hold`; the reason, and the reason in words with figures."""

    action: Action
    size: int
    reason: Reason
    words: str


Outcome = tuple[GroupDecision, GroupMemory]


def decide(rules: GroupRules, figures: GroupFigures, memory: GroupMemory, now: float) -> Outcome:
    """The decision and the new memory, which assumes that the decision is carried out.

    The size stays in [floor, max]. A group shrinks by one. Opposite actions are two cool-downs apart, except that a
    size below the floor, which somebody else must have set, is raised at once.
    """
    return _Policy(rules, figures, memory, now).decide()


class _Policy:
    def __init__(self, rules: GroupRules, figures: GroupFigures, memory: GroupMemory, now: float) -> None:
        self._rules, self._figures, self._now = rules, figures, now
        self._warm = [one.cpu for one in figures.instances if one.cpu is not None and self._is_warm(one)]
        """The CPU of each warm instance."""
        self._cpu = sum(self._warm)
        # Where CPU is not short, pressure says nothing about CPU; then the limit of lag decides.
        is_short = bool(self._warm) and self._cpu / len(self._warm) > rules.target_cpu
        self._load = self._cpu * figures.pressure if is_short else self._cpu
        self._has_lag = figures.lag is not None and figures.lag > rules.max_lag
        self._memory = self._remember(memory)

    def decide(self) -> Outcome:
        rules, size = self._rules, self._figures.size
        if size < rules.floor:
            return self._act("out", rules.floor, "below_min", f"{size} are fewer than {rules.floor}")
        if size > rules.max:
            return self._shrink("above_max", f"{size} are more than {rules.max}")
        if self._load / size > rules.target_cpu * (1 + rules.tolerance):
            words = f"CPU {self._load / size:.2f} an instance is above {rules.target_cpu:.2f}"
            return self._grow(max(size + 1, self._needed()), "cpu", words)
        if self._has_lag:
            words = f"lag {self._figures.lag:.0f} s is above {rules.max_lag:.0f} s"
            return self._grow(size + 1 + size // 4, "lag", words)
        return self._consider_in()

    def _is_warm(self, one: Instance) -> bool:
        is_known = one.ready and not one.leaving and one.cpu is not None
        return is_known and one.age is not None and one.age >= self._rules.warm_up

    def _needed(self) -> int:
        return math.ceil(self._load / self._rules.target_cpu - _ROUNDING)

    def _remember(self, memory: GroupMemory) -> GroupMemory:
        """With the present need. Without complete figures the window starts again."""
        if not self._warm or len(self._warm) < sum(not one.leaving for one in self._figures.instances):
            return replace(memory, since=None, needs=())
        need, now = self._needed(), self._now
        kept = [(at, old) for at, old in memory.needs if at > now - self._rules.calm and old > need]
        return replace(memory, since=now if memory.since is None else memory.since, needs=(*kept, (now, need)))

    def _grow(self, wanted: int, reason: Reason, words: str) -> Outcome:
        if self._figures.size >= self._rules.max:
            return self._hold("at_max", f"{words}, but {self._rules.max} are the most")
        if (wait := self._wait("out")) > 0:
            return self._hold("cool_down", f"{words}; cooling down for {wait:.0f} s more")
        if reason == "lag" and (starting := self._unsettled()):
            return self._hold("warming", f"{words}; {starting} is not at work yet")
        return self._act("out", min(wanted, self._rules.max), reason, words)

    def _consider_in(self) -> Outcome:
        rules, size, since = self._rules, self._figures.size, self._memory.since
        if not self._warm:
            return self._hold("no_figures", "no instance has reported its CPU since it warmed up")
        words = f"CPU {self._cpu / len(self._warm):.2f} an instance"
        most = max((need for _, need in self._memory.needs), default=size)
        if most >= size:
            return self._hold("cpu", f"{words}, target {rules.target_cpu:.2f}")
        if size == rules.floor:
            return self._hold("at_min", f"{words}; {rules.floor} are the fewest")
        if since is None or self._now - since < rules.calm:
            return self._hold("not_calm", f"{words}, but not known to be calm for {rules.calm:.0f} s")
        return self._shrink("calm", f"{words}; {most} were enough for {rules.calm:.0f} s")

    def _shrink(self, reason: Reason, words: str) -> Outcome:
        """One fewer, unless something is unsettled."""
        figures = self._figures
        if figures.under_way is not None:
            return self._hold("under_way", f"{words}; not while {figures.under_way}")
        if unsettled := self._unsettled():
            return self._hold("warming", f"{words}; {unsettled} is not settled")
        if self._has_lag:
            return self._hold("lag", f"{words}, but lag {figures.lag:.0f} s is above {self._rules.max_lag:.0f} s")
        if (wait := self._wait("in")) > 0:
            return self._hold("cool_down", f"{words}; cooling down for {wait:.0f} s more")
        return self._act("in", figures.size - 1, reason, words)

    def _unsettled(self) -> str | None:
        """An instance that starts, is silent or drains; or one that was ordered and is missing."""
        figures = self._figures
        found = next((one.name for one in figures.instances if not self._is_warm(one)), None)
        if found is None and len(figures.instances) != figures.size:
            return f"a group of {figures.size} with {len(figures.instances)} instances"
        return found

    def _wait(self, action: Action) -> float:
        """Seconds until the action is allowed."""
        if self._memory.last is None:
            return 0.0
        cool_downs = 1 if self._memory.last == action else 2
        return self._memory.acted_at + self._rules.cool_down * cool_downs - self._now

    def _act(self, action: Literal["out", "in"], size: int, reason: Reason, words: str) -> Outcome:
        memory = replace(self._memory, last=action, acted_at=self._now)
        return GroupDecision(action, size, reason, words), memory

    def _hold(self, reason: Reason, words: str) -> Outcome:
        return GroupDecision("hold", self._figures.size, reason, words), self._memory
