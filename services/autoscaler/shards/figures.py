"""What the shard policy sees, remembers and says."""

from dataclasses import dataclass, field, replace
from typing import Literal

from services.autoscaler.shards.day import DayPattern
from services.autoscaler.shards.layout import Layout
from services.autoscaler.shards.rules import QUOTA_S

LOOK_S = 60.0

Direction = Literal["up", "down"]


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """layout: the open shards. slots: the load of each slot, in shards, a mean of the last seconds.

    full: indexes of shards that refused entries, or let them wait. covered: since when (seconds) the figures are of this layout.
    changing: the stream is not ACTIVE. room: how many more shards the account may have. partial: some processes did not say
    what they write, so there may be more. ahead: the wall clock, by which the day goes, of the clock of
    decisions.
    """

    layout: Layout
    slots: tuple[float, ...]
    full: frozenset[int] = frozenset()
    covered: float = 0.0
    changing: bool = False
    room: int = 10_000
    partial: bool = False
    ahead: float = 0.0


@dataclass(frozen=True, slots=True)
class Update:
    """at: when it was done, or begun if it is not, by the clock of decisions. direction: whether it gave shards or took some."""

    at: float
    direction: Direction


@dataclass(frozen=True, slots=True)
class StreamMemory:
    """updates: of a rolling day, oldest first. looks: (when, load of each slot) of the last minutes, a minute apart."""

    updates: tuple[Update, ...] = ()
    looks: tuple[tuple[float, tuple[float, ...]], ...] = ()
    day: DayPattern = field(default_factory=DayPattern)

    def observe(self, figures: StreamFigures, now: float, window: float) -> "StreamMemory":
        """With this look, without what is older than the window or the day, or cannot be compared.

        While a shard refuses nobody sees the load, so growth is measured, and calm begins, behind it.
        """
        slots = figures.slots
        day = self.day.observe(sum(slots), now + figures.ahead)
        if figures.full:
            return StreamMemory(self.recent(now), (), day)
        looks = tuple(look for look in self.looks if look[0] > now - window and len(look[1]) == len(slots))
        if not looks or now - looks[-1][0] >= LOOK_S:
            looks = (*looks, (now, slots))
        return StreamMemory(self.recent(now), looks, day)

    def recent(self, now: float) -> tuple[Update, ...]:
        """The updates that count against the quota."""
        return tuple(one for one in self.updates if one.at > now - QUOTA_S)

    def begun(self, direction: Direction, now: float) -> "StreamMemory":
        """With this update."""
        return replace(self, updates=(*self.updates, Update(now, direction)))

    def finished(self, now: float) -> "StreamMemory":
        """With the newest update as done: quota and cool-down count from its end."""
        return replace(self, updates=(*self.updates[:-1], replace(self.updates[-1], at=now)))


@dataclass(frozen=True, slots=True)
class StreamDecision:
    """layout: what the stream should have; None: leave it. reason: for a person, with its figures.

    at_once: the layout is uniform, and UpdateShardCount makes it; else splits and merges, one after the other.
    """

    layout: Layout | None
    reason: str
    at_once: bool = False
