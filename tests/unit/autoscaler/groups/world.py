"""A group in simulated time: load is shared evenly, instances start and drain slowly, CPU cannot exceed what one has.

Some instances never work, die again and again, or hang while they leave.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Literal

from services.autoscaler.groups.members import Instance
from services.autoscaler.groups.policy import GroupDecision, GroupFigures, GroupMemory, GroupRules, decide

EVERY = 10.0
CAPACITY = 1.0
LIFE = 25.0
"""A crash-looping process dies at this age."""

Fate = Literal["well", "stuck", "silent", "loop", "hangs"]
"""well. stuck: never ready. silent: never answers. loop: dies again and again. hangs: well, but never gone once it leaves."""


@dataclass
class Box:
    """One instance."""

    name: str
    born: float
    fate: Fate = "well"
    left: float | None = None

    def works(self, now: float, starts: float) -> bool:
        return self.fate in ("well", "hangs") and self.left is None and now - self.born >= starts

    def is_gone(self, now: float, drains: float) -> bool:
        return self.left is not None and self.fate != "hangs" and now - self.left >= drains

    def figures(self, now: float, cpu: float, starts: float) -> Instance:
        """As the meter reports it. One that hangs while it leaves does not answer."""
        age, leaving = now - self.born, self.left is not None
        if self.fate == "silent" or (leaving and self.fate == "hangs"):
            return Instance(self.name, False, None, None, leaving)
        if self.fate == "loop":
            return Instance(self.name, True, age % LIFE, 0.1, leaving)
        ready = leaving or self.works(now, starts)
        return Instance(self.name, ready, age, cpu if ready else 0.0, leaving)


@dataclass
class World:
    """`demand`: cores of work that come in. `backlog`: core-seconds that wait. fates: of those that are started."""

    rules: GroupRules
    size: int = 1
    starts: float = 20.0
    drains: float = 15.0
    now: float = 0.0
    backlog: float = 0.0
    fates: Iterable[Fate] = ()
    state: GroupMemory = field(default_factory=GroupMemory)
    boxes: list[Box] = field(default_factory=list)
    taken: list[tuple[float, GroupDecision]] = field(default_factory=list)
    most_draining: int = 0
    """At once. One that hangs does not drain."""

    def __post_init__(self) -> None:
        self._fates: Iterator[Fate] = chain(self.fates, repeat("well"))
        self.boxes = [Box(f"i{number}", -1e6) for number in range(self.size)]
        self._made = self.size

    @property
    def staying(self) -> list[Box]:
        return [one for one in self.boxes if one.left is None]

    def tick(
        self, demand: float, under_way: str | None = None, failing: float = 0.0, frozen: str | None = None
    ) -> GroupDecision:
        """One look and what follows from it. failing: part of the demand that no receiver takes."""
        self.now += EVERY
        self.boxes = [one for one in self.boxes if not one.is_gone(self.now, self.drains)]
        working = sum(one.works(self.now, self.starts) for one in self.boxes)
        done = min(demand * (1 - failing) + self.backlog / EVERY, working * CAPACITY)
        self.backlog = max(0.0, self.backlog + (demand * (1 - failing) - done) * EVERY)
        cpu = done / working if working else 0.0
        instances = tuple(one.figures(self.now, cpu, self.starts) for one in self.boxes)
        lag = self.backlog / max(done, 0.01)
        pressure = max(1.0, demand * (1 - failing) / done) if done else 1.0
        figures = GroupFigures(self.size, instances, lag, pressure, under_way, frozen=frozen)
        decision, self.state = decide(self.rules, figures, self.state, self.now)
        self._carry_out(decision)
        return decision

    def _carry_out(self, decision: GroupDecision) -> None:
        if decision.action == "hold":
            return
        self.taken.append((self.now, decision))
        if decision.action == "in":
            failed = {one.name for one in decision.members.staying_failed}
            self._leave(next((one for one in self.staying if one.name in failed), self.staying[-1]))
        elif decision.action == "replace":
            self._leave(next(one for one in self.staying if one.name == decision.instance))
        self.size = decision.size
        while len(self.staying) < self.size:
            self.boxes.append(Box(f"i{self._made}", self.now, next(self._fates)))
            self._made += 1

    def _leave(self, box: Box) -> None:
        """One that never worked ends at once: it has nothing to drain."""
        box.left = self.now
        if box.fate not in ("well", "hangs"):
            self.boxes.remove(box)
        draining = sum(one.left is not None and self.now - one.left < self.drains for one in self.boxes)
        self.most_draining = max(self.most_draining, draining)
