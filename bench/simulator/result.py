"""What one policy made of one trace."""

from dataclasses import dataclass, field

from bench.simulator.traces import DAY_S, STEP_S


@dataclass(slots=True)
class Result:
    """over: minutes with anything over capacity. throttled: events. hours: of shards or instances. actions: (second, change).

    dropped: updates that a policy wanted and the quota forbade. asked, had: by minute, in shards or instances, for the plot.
    """

    policy: str
    over: set[int] = field(default_factory=set)
    throttled: float = 0.0
    hours: float = 0.0
    actions: list[tuple[float, int]] = field(default_factory=list)
    dropped: int = 0
    asked: list[float] = field(default_factory=list)
    had: list[float] = field(default_factory=list)

    def note(self, at: float, asked: float, had: int, excess: float, events: float) -> None:
        """One step: excess in shards or instances; events: what one of them takes a second."""
        if excess > 1e-9:
            self.over.add(int(at // 60))
            self.throttled += excess * events * STEP_S
        self.hours += had * STEP_S / 3_600
        if at % 60 == 0:
            self.asked.append(asked)
            self.had.append(had)

    @property
    def busiest_day(self) -> int:
        """The most actions in any 24 hours."""
        times = [at for at, _ in self.actions]
        return max((sum(at <= other < at + DAY_S for other in times) for at in times), default=0)

    def reversals(self, within: float) -> int:
        """Actions that undo the direction of the one before, sooner than `within` seconds after it."""
        pairs = zip(self.actions, self.actions[1:], strict=False)
        return sum(one[1] * two[1] < 0 and two[0] - one[0] < within for one, two in pairs)
