"""A stream of shards in simulated time: what it takes, what it refuses, how long a change lasts, how many it allows.

Taken for true (AWS publishes no times): a split or merge of one's own takes 30 s, one after the other; UpdateShardCount
60 s to a multiple of a quarter, 120 s elsewhere. Every action is held to the published quota of UpdateShardCount.
"""

from collections import deque
from collections.abc import Callable

import numpy as np

from bench.simulator.others import OTHERS
from bench.simulator.result import Result
from bench.simulator.traces import DAY_S, SLOTS, Floats, Trace
from services.autoscaler.shards.figures import StreamDecision, StreamFigures, StreamMemory
from services.autoscaler.shards.layout import OWN_S, Layout, at_once_seconds, uniform
from services.autoscaler.shards.policy import decide

EVENTS_PER_SHARD = 1_000.0
_MEAN_STEPS = 2
_START_USED = 0.65


class Stream:
    """One stream. layout: now. The figures are those of the last step."""

    def __init__(self, first: Floats, policy: str) -> None:
        self.layout: Layout = uniform(max(1, int(np.ceil(first.sum() / _START_USED))), SLOTS)
        self.result = Result(policy)
        self.since = 0.0
        self._coming: deque[tuple[float, Layout]] = deque()
        self.taken: deque[Floats] = deque(maxlen=_MEAN_STEPS)
        self.full: frozenset[int] = frozenset()

    def step(self, at: float, slots: Floats) -> None:
        """The traffic of one step."""
        while self._coming and self._coming[0][0] <= at:
            self.since, self.layout = self._coming.popleft()
            self.taken.clear()
        loads = np.add.reduceat(np.append(slots, 0.0), self.layout)
        self.full = frozenset(int(shard) for shard in np.flatnonzero(loads > 1.0))
        sizes = np.diff([*self.layout, SLOTS])
        self.taken.append(slots / np.repeat(np.maximum(1.0, loads), sizes))
        excess = float(np.maximum(0.0, loads - 1.0).sum())
        self.result.note(at, float(slots.sum()), len(self.layout), excess, EVENTS_PER_SHARD)

    @property
    def is_changing(self) -> bool:
        """Not ACTIVE."""
        return bool(self._coming)

    def change(self, decision: StreamDecision, at: float) -> None:
        """Begin what a decision says, unless the service refuses it."""
        wanted, count = decision.layout, len(self.layout)
        recent = [when for when, _ in self.result.actions if when > at - DAY_S]
        if wanted is None or wanted == self.layout or self.is_changing:
            return
        if len(recent) >= 10:
            self.result.dropped += 1
            return
        assert -(-count // 2) <= len(wanted) <= 2 * count, (count, len(wanted))
        self.result.actions.append((at, len(wanted) - count))
        if decision.at_once:
            self._coming.append((at + at_once_seconds(count, len(wanted)), wanted))
            return
        cuts = set(self.layout)
        for cut in [*sorted(set(wanted) - cuts), *sorted(cuts - set(wanted))]:
            at += OWN_S
            cuts ^= {cut}
            self._coming.append((at, tuple(sorted(cuts))))


def run_ours(trace: Trace, tell: Callable[[str], None] = lambda _text: None) -> Result:
    """Our policy on a trace."""
    steps = trace.steps()
    stream, memory = Stream(steps[0][1], "Penstock"), StreamMemory()
    for at, slots in steps:
        was_changing = stream.is_changing
        stream.step(at, slots)
        if was_changing and not stream.is_changing:
            memory = memory.with_update_finished(at)
        mean = tuple(np.mean(stream.taken, axis=0).tolist())
        figures = StreamFigures(stream.layout, mean, stream.full, at - stream.since, stream.is_changing)
        decision, memory = decide(figures, memory, at)
        if decision.layout is not None:
            tell(f"{at / 3600:6.2f} h: {decision.reason}")
        stream.change(decision, at)
    return stream.result


def run_other(trace: Trace, name: str) -> Result:
    """Another system's rule on a trace; it sees the mean utilisation that CloudWatch shows, and gets equal ranges."""
    policy = OTHERS[name]()
    steps = trace.steps()
    stream = Stream(steps[0][1], name)
    for at, slots in steps:
        stream.step(at, slots)
        count = len(stream.layout)
        wish = policy(float(stream.taken[-1].sum()) / count, count, at)
        wish = min(2 * count, SLOTS, max(-(-count // 2), wish))
        if wish != count:
            stream.change(StreamDecision(uniform(wish, SLOTS), name, at_once=True), at)
    return stream.result
