"""A group of instances in simulated time: what waits when they are too few, and how long a new one takes to work.

Taken for true: an instance starts in 60 s, and costs from when it was ordered; one that leaves finishes within a step. What
cannot be worked off waits, and is worked off later; an event that had to wait counts once.
"""

from bench.simulator.others import OTHERS, TARGET
from bench.simulator.result import Result
from bench.simulator.traces import STEP_S, Trace
from services.autoscaler.groups.members import Instance
from services.autoscaler.groups.policy import GroupFigures, GroupMemory, GroupRules, decide

EVENTS_PER_INSTANCE = 1_000.0
_START_S = 60.0
_MOST = 400


class Group:
    """Instances by when they were ordered, the oldest first. Those of before the start have worked for long."""

    def __init__(self, load: float, policy: str) -> None:
        self.ordered = [-3_600.0] * max(1, round(load / TARGET + 0.5))
        self.result = Result(policy)
        self.used = self.asked = 0.0
        self.waiting = 0.0

    def working(self, at: float) -> int:
        """How many take work."""
        return sum(at - ordered >= _START_S for ordered in self.ordered)

    def step(self, at: float, asked: float) -> None:
        """The traffic of one step, in instances."""
        working = self.working(at)
        done = min(float(working), asked + self.waiting / STEP_S)
        self.used, self.asked = done / max(1, working), asked
        late = max(0.0, asked - done)
        self.waiting = max(0.0, self.waiting + (asked - done) * STEP_S)
        self.result.note(at, asked, len(self.ordered), late, EVENTS_PER_INSTANCE)

    def resize(self, size: int, at: float) -> None:
        """The youngest leave first."""
        count = len(self.ordered)
        size = min(_MOST, max(1, size))
        if size == count:
            return
        self.result.actions.append((at, size - count))
        self.ordered = self.ordered[:size] if size < count else [*self.ordered, *[at] * (size - count)]

    def figures(self, at: float) -> GroupFigures:
        """As our scaler measures: an instance that starts does not say its CPU yet."""
        instances = tuple(
            Instance(f"i{number}", True, at - ordered, self.used)
            if at - ordered >= _START_S
            else Instance(f"i{number}", False, None, None)
            for number, ordered in enumerate(self.ordered)
        )
        done = self.used * self.working(at)
        lag = self.waiting / done if done > 0 else 0.0
        return GroupFigures(len(self.ordered), instances, lag, max(1.0, self.asked / done) if done > 0 else 1.0)


def run_ours(trace: Trace) -> Result:
    """Our group policy on a trace, with its defaults and the others' target."""
    rules, state = GroupRules(max=_MOST, target_cpu=TARGET), GroupMemory()
    steps = trace.steps()
    group = Group(float(steps[0][1].sum()), "Penstock")
    for at, slots in steps:
        group.step(at, float(slots.sum()))
        decision, state = decide(rules, group.figures(at), state, at)
        if decision.action != "hold":
            group.resize(decision.size, at)
    return group.result


def run_other(trace: Trace, name: str) -> Result:
    """Another system's rule on a trace."""
    policy = OTHERS[name]()
    steps = trace.steps()
    group = Group(float(steps[0][1].sum()), name)
    for at, slots in steps:
        group.step(at, float(slots.sum()))
        # Their mean is over the instances that work; wishes count from all that were ordered.
        used = group.used * group.working(at) / len(group.ordered)
        group.resize(policy(used, len(group.ordered), at), at)
    return group.result
