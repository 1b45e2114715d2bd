"""A group in simulated time: load is shared evenly, instances start and drain slowly, CPU cannot exceed what one has."""

from dataclasses import dataclass, field

from services.autoscaler.groups.policy import GroupDecision, GroupFigures, GroupMemory, GroupRules, Instance, decide

EVERY = 10.0
CAPACITY = 1.0


@dataclass
class World:
    """`demand`: cores of work that come in. `backlog`: core-seconds that wait."""

    rules: GroupRules
    size: int = 1
    starts: float = 20.0
    drains: float = 15.0
    now: float = 0.0
    backlog: float = 0.0
    state: GroupMemory = field(default_factory=GroupMemory)
    born: list[float] = field(default_factory=list)
    leaving: list[float] = field(default_factory=list)
    taken: list[tuple[float, GroupDecision]] = field(default_factory=list)
    most_leaving: int = 0

    def __post_init__(self) -> None:
        self.born = [-1e6] * self.size

    def tick(self, demand: float, under_way: str | None = None, failing: float = 0.0) -> GroupDecision:
        """One look and what follows from it. failing: part of the demand that no receiver takes."""
        self.now += EVERY
        self.leaving = [at for at in self.leaving if self.now - at < self.drains]
        working = [at for at in self.born if self.now - at >= self.starts]
        done = min(demand * (1 - failing) + self.backlog / EVERY, len(working) * CAPACITY)
        self.backlog = max(0.0, self.backlog + (demand * (1 - failing) - done) * EVERY)
        instances = [
            Instance(f"i{at}", at in working, self.now - at, done / len(working) if at in working else 0.0)
            for at in self.born
        ]
        instances += [Instance(f"l{at}", True, 1e6, 0.1, leaving=True) for at in self.leaving]
        lag = self.backlog / max(done, 0.01)
        pressure = max(1.0, demand * (1 - failing) / done) if done else 1.0
        figures = GroupFigures(self.size, tuple(instances), lag, pressure, under_way)
        decision, self.state = decide(self.rules, figures, self.state, self.now)
        self._resize(decision)
        return decision

    def _resize(self, decision: GroupDecision) -> None:
        if decision.action == "hold":
            return
        self.taken.append((self.now, decision))
        if decision.action == "in":
            self.born.pop()
            self.leaving.append(self.now)
            self.most_leaving = max(self.most_leaving, len(self.leaving))
        self.born += [self.now] * (decision.size - len(self.born))
        self.size = decision.size
