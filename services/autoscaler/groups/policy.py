"""How large a group should be: a pure function of its rules, its figures and earlier decisions.

Target tracking. The load is the CPU of all warm instances together. The number of instances that it needs at the target is
compared with the size that was *ordered*, so instances that are starting count, and are not ordered twice. Failed instances
do not count, and are replaced one at a time.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.autoscaler.groups.backlog import LATE_S, Backlog, HotPartitions, measure_lateness
from services.autoscaler.groups.members import Failed, Instance, Members, Watched, forget, sort, watch
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
    failed_after: Duration = Field(
        300.0,
        description="An instance that starts, is silent or leaves for so long counts as failed. Longer than a start and a drain.",
    )

    @model_validator(mode="after")
    def _room(self) -> Self:
        if self.max < self.floor:
            raise ValueError(f"max is {self.max}, but min and fault_tolerance ask for {self.floor}")
        if self.failed_after <= self.warm_up:
            raise ValueError(
                f"failed_after is {self.failed_after:g} s, but an instance warms up for {self.warm_up:g} s"
            )
        return self

    @property
    def floor(self) -> int:
        return max(self.min, self.fault_tolerance)


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """A group at one moment.

    size: the ordered number of instances; 0: a person has switched the group off. lag: age in seconds of the oldest event that
    waits although its receiver works; None: unknown. pressure: events in per event delivered, 1.0 when the group keeps pace.
    under_way: a deploy or rebalance that must not be disturbed, in words; None: none. backlogs: the lag by partition.
    frozen: who froze the group and why, in words; None: it is not frozen.
    """

    size: int
    instances: tuple[Instance, ...]
    lag: float | None = None
    pressure: float = 1.0
    under_way: str | None = None
    backlogs: tuple[Backlog, ...] = ()
    frozen: str | None = None


Action = Literal["out", "in", "replace", "hold"]
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
    "failed",  # replace: an instance has failed; hold: new instances fail, so more would not help
    "hot_partition",  # the lag is in fewer partitions than instances
    "frozen",  # by a person; without the freeze the size would change
    "off",  # a person has set the size to 0
]

_ROUNDING = 1e-9
"""Of a share of cores, for sums of floats."""


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """What the policy remembers. Times are of the caller's clock, in seconds.

    last, acted_at: the last action. since: figures are complete from then on. needs: (time, instances needed),
    strictly falling: the first is the highest need within the window. watched: the instances. uneven_since: since then there
    are fewer or more instances than ordered; None: there are as many. replaced: replacements since all instances worked.
    """

    last: Literal["out", "in"] | None = None
    acted_at: float = 0.0
    since: float | None = None
    needs: tuple[tuple[float, int], ...] = ()
    watched: tuple[Watched, ...] = ()
    uneven_since: float | None = None
    replaced: int = 0


@dataclass(frozen=True, slots=True)
class GroupDecision:
    """The size to order, the present one for `hold` and `replace`; the reason, and the reason in words with figures.

    Of a frozen group: the size that is not ordered. members: the instances by state. instance: the one to replace. hot: lag
    that more instances cannot reduce.
    """

    action: Action
    size: int
    reason: Reason
    words: str
    members: Members
    instance: str | None = None
    hot: HotPartitions | None = None


Outcome = tuple[GroupDecision, GroupMemory]


MOST_REPLACEMENTS = 2
"""After so many in a row that did not help, a person must look."""


def decide(rules: GroupRules, figures: GroupFigures, memory: GroupMemory, now: float) -> Outcome:
    """The decision and the new memory, which assumes that the decision is carried out.

    The size stays in [floor, max], or at 0. A group shrinks by one. Opposite actions are two cool-downs apart, except that a
    size below the floor, which somebody else must have set, is raised at once. One instance leaves at a time, also for a
    replacement: nobody leaves while another instance starts, is silent or drains, until that one counts as failed.
    """
    return _Policy(rules, figures, memory, now).decide()


class _Policy:
    def __init__(self, rules: GroupRules, figures: GroupFigures, memory: GroupMemory, now: float) -> None:
        self._rules, self._figures, self._now = rules, figures, now
        self._memory, self._members = self._watch(memory)
        self._warm = [one.cpu for one in self._members.working if one.cpu is not None]
        """The CPU of each working instance."""
        self._cpu = sum(self._warm)
        self._capacity = max(1, figures.size - self._members.missing)
        """The ordered instances that work, or will."""
        self._late = measure_lateness(figures.backlogs, self._warm, rules.target_cpu)
        self._helped_lag = self._late.helped if figures.backlogs else figures.lag or 0.0
        """The lag that more instances may reduce, in s."""
        # Where CPU is not short, pressure says nothing about CPU; then the limit of lag decides.
        is_short = bool(self._warm) and self._cpu / len(self._warm) > rules.target_cpu
        counts = is_short and (self._late.hot is None or self._helped_lag >= LATE_S)
        self._load = self._cpu * figures.pressure if counts else self._cpu
        self._has_lag = figures.lag is not None and figures.lag > rules.max_lag
        self._memory = self._remember(self._memory)

    def decide(self) -> Outcome:
        decision, memory = self._decide()
        if decision.action == "hold" and (failed := self._replaceable(decision)) is not None:
            decision, memory = self._replace(failed)
        frozen, words = self._figures.frozen, decision.words
        if frozen is not None and decision.action != "hold":
            step = decision.instance or f"{self._figures.size} -> {decision.size}"
            words = f"{frozen}; otherwise {decision.action} {step}: {words}"
            decision, memory = replace(decision, action="hold", reason="frozen", instance=None), self._memory
        elif frozen is not None:
            words = f"{words}; {frozen}"
        if self._members.words and decision.reason != "failed":
            words += f"; failed: {self._members.words}"
        return replace(decision, words=words), memory

    def _decide(self) -> Outcome:
        rules, size = self._rules, self._figures.size
        if size == 0:
            return self._hold("off", "a person has set the size to 0; it stays until somebody sets another")
        if size < rules.floor:
            return self._act("out", rules.floor, "below_min", f"{size} are fewer than {rules.floor}")
        if size > rules.max:
            return self._shrink("above_max", f"{size} are more than {rules.max}")
        hot = self._late.hot
        if self._load / self._capacity > rules.target_cpu * (1 + rules.tolerance):
            words = f"CPU {self._load / self._capacity:.2f} an instance is above {rules.target_cpu:.2f}"
            if hot is not None and self._helped_lag < LATE_S:
                return self._hold_hot(hot, words)
            return self._grow(max(size + 1, self._needed() + self._members.missing), "cpu", words)
        if self._helped_lag > rules.max_lag:
            words = f"lag {self._helped_lag:.0f} s is above {rules.max_lag:.0f} s"
            return self._grow(size + 1 + size // 4, "lag", words)
        if hot is not None and self._has_lag:
            return self._hold_hot(hot, f"lag {self._figures.lag:.0f} s is above {rules.max_lag:.0f} s")
        return self._consider_in()

    def _watch(self, memory: GroupMemory) -> tuple[GroupMemory, Members]:
        figures, rules, now = self._figures, self._rules, self._now
        watched = watch(figures.instances, memory.watched, now, rules.warm_up, rules.failed_after)
        sorted_ = sort(figures.instances, watched, 0, now, rules.failed_after)
        staying = sum(not one.leaving for one in figures.instances)
        extra = staying - figures.size
        is_even = extra == 0 or 0 < extra <= len(
            sorted_.staying_failed
        )  # a failed one may have its successor beside it
        uneven_since = None if is_even else now if memory.uneven_since is None else memory.uneven_since
        memory = replace(memory, watched=watched, uneven_since=uneven_since)
        members = replace(sorted_, absent=max(0, -extra) if self._is_overdue(uneven_since) else 0)
        worked = all(one.age is not None and one.age >= rules.failed_after for one in members.working)
        if is_even and worked and not members.staying_failed and not members.starting:
            memory = replace(memory, replaced=0)
        return memory, members

    def _is_overdue(self, since: float | None) -> bool:
        return since is not None and self._now - since >= self._rules.failed_after

    def _needed(self) -> int:
        return math.ceil(self._load / self._rules.target_cpu - _ROUNDING)

    def _remember(self, memory: GroupMemory) -> GroupMemory:
        """With the present need. Without complete figures the window starts again. Failed instances have no figures."""
        if not self._warm or self._members.starting or self._figures.size == 0:
            return replace(memory, since=None, needs=())
        need, now = self._needed(), self._now
        kept = [(at, old) for at, old in memory.needs if at > now - self._rules.calm and old > need]
        return replace(memory, since=now if memory.since is None else memory.since, needs=(*kept, (now, need)))

    def _grow(self, wanted: int, reason: Reason, words: str) -> Outcome:
        members = self._members
        if self._figures.size >= self._rules.max:
            return self._hold("at_max", f"{words}, but {self._rules.max} are the most")
        if members.useless and (not members.working or members.useless > max(1, len(members.working) // 4)):
            return self._hold("failed", f"{words}, but new instances fail, so more would not help: {members.words}")
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
        if unsettled := self._unsettled() or self._members.still_draining:
            return self._hold("warming", f"{words}; {unsettled} is not settled")
        if self._is_blind:
            return self._hold("failed", f"{words}, but most instances have failed: {self._members.words}")
        if self._has_lag:
            return self._hold("lag", f"{words}, but lag {figures.lag:.0f} s is above {self._rules.max_lag:.0f} s")
        if (wait := self._wait("in")) > 0:
            return self._hold("cool_down", f"{words}; cooling down for {wait:.0f} s more")
        return self._act("in", figures.size - 1, reason, words)

    def _replaceable(self, held: GroupDecision) -> Failed | None:
        """A failed instance that may be replaced now, while the decision is `held`; None: none. A group that is about to
        shrink loses the failed one by that.
        """
        members, figures = self._members, self._figures
        if not members.staying_failed or self._is_blind:
            return None
        if held.reason in ("not_calm", "under_way") or figures.under_way is not None or figures.size == 0:
            return None
        if members.starting or members.leaving or members.still_draining or self._wait("out") > 0:
            return None
        return members.staying_failed[0] if self._memory.replaced < MOST_REPLACEMENTS else None

    @property
    def _is_blind(self) -> bool:
        """Whether more instances have failed than work: the fault may be in what we see. So nobody leaves."""
        return len(self._members.staying_failed) > len(self._members.working)

    def _replace(self, failed: Failed) -> Outcome:
        watched = forget(self._memory.watched, failed.name)
        memory = replace(self._memory, watched=watched, replaced=self._memory.replaced + 1)
        memory = replace(memory, last="out", acted_at=self._now)
        words = f"{failed} is replaced, {memory.replaced} of at most {MOST_REPLACEMENTS} times in a row"
        return self._make("replace", self._figures.size, "failed", words, failed.name), memory

    def _unsettled(self) -> str | None:
        """An instance that starts, is silent or drains; or one that was ordered and is missing. None when they are overdue."""
        members, figures = self._members, self._figures
        found = next(iter((*members.starting, *members.leaving)), None)
        if found is None and self._memory.uneven_since is not None and not self._is_overdue(self._memory.uneven_since):
            return f"a group of {figures.size} with {len(figures.instances)} instances"
        return found

    def _wait(self, action: Literal["out", "in"]) -> float:
        """Seconds until the action is allowed."""
        if self._memory.last is None:
            return 0.0
        cool_downs = 1 if self._memory.last == action else 2
        return self._memory.acted_at + self._rules.cool_down * cool_downs - self._now

    def _act(self, action: Literal["out", "in"], size: int, reason: Reason, words: str) -> Outcome:
        memory = replace(self._memory, last=action, acted_at=self._now)
        return self._make(action, size, reason, words), memory

    def _hold(self, reason: Reason, words: str) -> Outcome:
        return self._make("hold", self._figures.size, reason, words), self._memory

    def _hold_hot(self, hot: HotPartitions, words: str) -> Outcome:
        return self._hold("hot_partition", f"{words}, but {hot.words}; more instances would not help")

    def _make(
        self, action: Action, size: int, reason: Reason, words: str, instance: str | None = None
    ) -> GroupDecision:
        return GroupDecision(action, size, reason, words, self._members, instance, self._late.hot)
