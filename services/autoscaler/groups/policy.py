"""How large a group should be: a pure function of its rules, its figures and earlier decisions.

Target tracking. The load is the CPU of all warm instances together. The instances that it needs at the target are
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
        """The fewest instances."""
        return max(self.min, self.fault_tolerance)


@dataclass(frozen=True, slots=True)
class Instance:
    """age: seconds since its process began. cpu: cores used on average since the last measurement. Both are None
    while unknown."""

    name: str
    ready: bool
    age: float | None
    cpu: float | None
    leaving: bool = False
    """It drains, or was ordered to."""


@dataclass(frozen=True, slots=True)
class Figures:
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
class State:
    """What the policy remembers. Times are of the caller's clock, in seconds.

    last, acted_at: the last action. since: figures are complete from then on. needs: (time, instances needed),
    strictly falling: the first is the highest need within the window.
    """

    last: Literal["out", "in"] | None = None
    acted_at: float = 0.0
    since: float | None = None
    needs: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The size to order, the present one for `hold`; the reason, and the reason in words with figures."""

    action: Action
    size: int
    reason: Reason
    words: str


Outcome = tuple[Decision, State]


def decide(rules: GroupRules, figures: Figures, state: State, now: float) -> Outcome:
    """The decision and the new state, which assumes that the decision is carried out.

    The size stays in [floor, max]. A group shrinks by one. Opposite actions are two cool-downs apart, except that a
    size below the floor, which somebody else must have set, is raised at once.
    """
    warm = _warm(rules, figures)
    figures = _without_idle_pressure(rules, figures, warm)
    state = _remember(rules, state, figures, warm, now)
    size = figures.size
    if size < rules.floor:
        return _act(state, "out", rules.floor, "below_min", f"{size} are fewer than {rules.floor}", now)
    if size > rules.max:
        return _shrink(rules, state, figures, "above_max", f"{size} are more than {rules.max}", now)
    if (wanted := _wanted_out(rules, figures, warm)) is not None:
        return _grow(rules, state, figures, *wanted, now)
    return _consider_in(rules, state, figures, warm, now)


def _warm(rules: GroupRules, figures: Figures) -> list[float]:
    """The CPU of each warm instance."""
    return [one.cpu for one in figures.instances if one.cpu is not None and _is_warm(rules, one)]


def _without_idle_pressure(rules: GroupRules, figures: Figures, warm: list[float]) -> Figures:
    """Where CPU is not short, pressure says nothing about CPU; then the limit of lag decides."""
    short = bool(warm) and sum(warm) / len(warm) > rules.target_cpu
    return figures if short else replace(figures, pressure=1.0)


def _is_warm(rules: GroupRules, one: Instance) -> bool:
    return one.ready and not one.leaving and one.cpu is not None and one.age is not None and one.age >= rules.warm_up


def _needed(load: float, cpu: float) -> int:
    return math.ceil(load / cpu - _ROUNDING)


def _remember(rules: GroupRules, state: State, figures: Figures, warm: list[float], now: float) -> State:
    """With the present need. Without complete figures the window starts again."""
    if not warm or len(warm) < sum(not one.leaving for one in figures.instances):
        return replace(state, since=None, needs=())
    need = _needed(sum(warm) * figures.pressure, rules.target_cpu)
    kept = [(at, old) for at, old in state.needs if at > now - rules.calm and old > need]
    return replace(state, since=now if state.since is None else state.since, needs=(*kept, (now, need)))


def _wanted_out(rules: GroupRules, figures: Figures, warm: list[float]) -> tuple[int, Reason, str] | None:
    """(size, reason, words) when more instances are needed than ordered."""
    load = sum(warm) * figures.pressure
    if load / figures.size > rules.target_cpu * (1 + rules.tolerance):
        wanted = max(figures.size + 1, _needed(load, rules.target_cpu))
        return wanted, "cpu", f"CPU {load / figures.size:.2f} an instance is above {rules.target_cpu:.2f}"
    if _lags(rules, figures):
        return figures.size + 1 + figures.size // 4, "lag", f"lag {figures.lag:.0f} s is above {rules.max_lag:.0f} s"
    return None


def _lags(rules: GroupRules, figures: Figures) -> bool:
    return figures.lag is not None and figures.lag > rules.max_lag


def _grow(
    rules: GroupRules, state: State, figures: Figures, wanted: int, reason: Reason, words: str, now: float
) -> Outcome:
    if figures.size >= rules.max:
        return _hold(state, figures, "at_max", f"{words}, but {rules.max} are the most")
    if (wait := _wait(rules, state, "out", now)) > 0:
        return _hold(state, figures, "cool_down", f"{words}; cooling down for {wait:.0f} s more")
    if reason == "lag" and (starting := _unsettled(rules, figures)):
        return _hold(state, figures, "warming", f"{words}; {starting} is not at work yet")
    return _act(state, "out", min(wanted, rules.max), reason, words, now)


def _consider_in(rules: GroupRules, state: State, figures: Figures, warm: list[float], now: float) -> Outcome:
    if not warm:
        return _hold(state, figures, "no_figures", "no instance has told its CPU over a warm period yet")
    average = sum(warm) / len(warm)
    words = f"CPU {average:.2f} an instance"
    most = max((need for _, need in state.needs), default=figures.size)
    if most >= figures.size:
        return _hold(state, figures, "cpu", f"{words}, target {rules.target_cpu:.2f}")
    if figures.size == rules.floor:
        return _hold(state, figures, "at_min", f"{words}; {rules.floor} are the fewest")
    if state.since is None or now - state.since < rules.calm:
        return _hold(state, figures, "not_calm", f"{words}, but not known to be calm for {rules.calm:.0f} s")
    return _shrink(rules, state, figures, "calm", f"{words}; {most} were enough for {rules.calm:.0f} s", now)


def _shrink(rules: GroupRules, state: State, figures: Figures, reason: Reason, words: str, now: float) -> Outcome:
    """One fewer, unless something is unsettled."""
    if figures.under_way is not None:
        return _hold(state, figures, "under_way", f"{words}; not while {figures.under_way}")
    if unsettled := _unsettled(rules, figures):
        return _hold(state, figures, "warming", f"{words}; {unsettled} is not settled")
    if _lags(rules, figures):
        return _hold(state, figures, "lag", f"{words}, but lag {figures.lag:.0f} s is above {rules.max_lag:.0f} s")
    if (wait := _wait(rules, state, "in", now)) > 0:
        return _hold(state, figures, "cool_down", f"{words}; cooling down for {wait:.0f} s more")
    return _act(state, "in", figures.size - 1, reason, words, now)


def _unsettled(rules: GroupRules, figures: Figures) -> str | None:
    """An instance that starts, is silent or drains; or one that was ordered and is missing."""
    found = next((one.name for one in figures.instances if not _is_warm(rules, one)), None)
    if found is None and len(figures.instances) != figures.size:
        return f"a group of {figures.size} with {len(figures.instances)} instances"
    return found


def _wait(rules: GroupRules, state: State, action: Action, now: float) -> float:
    """Seconds until the action is allowed."""
    if state.last is None:
        return 0.0
    return state.acted_at + rules.cool_down * (1 if state.last == action else 2) - now


def _act(state: State, action: Literal["out", "in"], size: int, reason: Reason, words: str, now: float) -> Outcome:
    return Decision(action, size, reason, words), replace(state, last=action, acted_at=now)


def _hold(state: State, figures: Figures, reason: Reason, words: str) -> Outcome:
    return Decision("hold", figures.size, reason, words), state
