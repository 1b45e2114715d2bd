"""How large a group should be: a pure function of its rules, its figures and what was decided before.

Target tracking. The load is the CPU of all warm instances together; what it needs at the target is compared with the size that
the platform was *told*, so instances that are starting count as capacity and are not ordered twice.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal

from services.autoscaler.groups.figures import Figures, Instance
from services.autoscaler.groups.rules import GroupRules

Action = Literal["out", "in", "hold"]
Reason = Literal[
    "cpu",  # out: the average is above the target; hold: it is within the tolerance
    "lag",  # out: more lag than allowed, although CPU is low; hold: not in, for the same reason
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
"""Of a share of cores: below it, a whole number is meant."""


@dataclass(frozen=True, slots=True)
class State:
    """What the policy remembers. Times are of the caller's clock, in seconds.

    last, acted_at: the last action. since: figures are complete from here on without a gap. needs: (time, instances needed),
    strictly falling, so the first is the most that was needed within the window; at most as many as there are sizes.
    """

    last: Literal["out", "in"] | None = None
    acted_at: float = 0.0
    since: float | None = None
    needs: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do: the size to order, which is the present one for `hold`; why, and why in words with figures."""

    action: Action
    size: int
    reason: Reason
    words: str


Outcome = tuple[Decision, State]


def decide(rules: GroupRules, figures: Figures, state: State, now: float) -> Outcome:
    """The decision, with its reason, and what to remember. The state assumes that the decision is carried out.

    Holds: the size stays in [floor, max]; in by one; opposite actions at least two cool-downs apart, except that a size below
    the floor, which somebody else must have set, is repaired at once.
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
    """The CPU of each instance whose CPU counts."""
    return [one.cpu for one in figures.instances if one.cpu is not None and _is_warm(rules, one)]


def _without_idle_pressure(rules: GroupRules, figures: Figures, warm: list[float]) -> Figures:
    """Work that comes in faster than it is done tells of missing CPU only where CPU is short; else the lag guard is for it."""
    short = bool(warm) and sum(warm) / len(warm) > rules.target_cpu
    return figures if short else replace(figures, pressure=1.0)


def _is_warm(rules: GroupRules, one: Instance) -> bool:
    return one.ready and not one.leaving and one.cpu is not None and one.age is not None and one.age >= rules.warm_up


def _needed(load: float, cpu: float) -> int:
    """Instances so that none has more than `cpu` of the load."""
    return math.ceil(load / cpu - _ROUNDING)


def _remember(rules: GroupRules, state: State, figures: Figures, warm: list[float], now: float) -> State:
    """The state with the present need; without complete figures the window begins anew."""
    if not warm or len(warm) < sum(not one.leaving for one in figures.instances):
        return replace(state, since=None, needs=())
    need = _needed(sum(warm) * figures.pressure, rules.target_cpu)
    kept = [(at, old) for at, old in state.needs if at > now - rules.calm and old > need]
    return replace(state, since=now if state.since is None else state.since, needs=(*kept, (now, need)))


def _wanted_out(rules: GroupRules, figures: Figures, warm: list[float]) -> tuple[int, Reason, str] | None:
    """(size, reason, words) when more instances are needed than were ordered."""
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
    """One fewer, unless something is not settled."""
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
    """An instance that starts, is silent or drains; or that was ordered and is not there."""
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
