"""The input, memory and output of the shard policy. Times in seconds, loads in shards: 1 is the limit of a shard."""

from dataclasses import dataclass, field, replace
from typing import Literal

from services.autoscaler.shards.layout import Layout

DAY_S = 86_400.0
QUOTA_S = DAY_S + 60.0
"""How long an update counts. The service's day begins when it accepts the request, and clocks differ."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The parameters of the policy.

    high: a shard above it, now or by forecast, is too full. target: the highest load of a shard after an update. low:
    the highest load of a shard after merging, at the highest load of the last `calm` seconds. lead: how far ahead a
    full shard must be forecast; an update and its new figures take this long. size_for: how far ahead the layout is
    sized where all shards grow. calm: the least time between opposite updates (two cool-downs). cover: how long
    figures must be collected after a change. outlook: how far ahead the day's pattern must be low before merging.
    fullness: a shard that refuses is assumed to be asked for this many times its load. updates: the service's quota
    in a rolling day. reserve: updates not used for merging. step: the growth expected of one update when planning for
    the day's peak. plenty: with this many updates left the rules `_with_plenty` hold; `target_with_plenty` only while
    no shard refuses. worth: the share of shards that a merge must save.
    """

    high: float = 0.9
    target: float = 0.78
    target_with_plenty: float = 0.84
    low: float = 0.68
    low_with_plenty: float = 0.75
    lead: float = 300.0
    size_for: float = 1_800.0
    calm: float = 600.0
    cover: float = 45.0
    outlook: float = 3_600.0
    fullness: float = 2.0
    updates: int = 10
    plenty: int = 7
    reserve: int = 2
    step: float = 1.8
    worth: float = 0.2
    worth_with_plenty: float = 0.05


RULES = Rules()


QUARTER_S = 900.0
QUARTERS = 96
UNKNOWN = -1.0
_LEAST_RATIO, _MOST_RATIO = 0.5, 1.5


@dataclass(frozen=True, slots=True)
class DayPattern:
    """The peak of each quarter of an hour, of the last two days: total loads; `UNKNOWN` without figures. Immutable.

    The lower of both days is expected again. One day alone predicts nothing: a peak that came once does not come
    every day. quarter: number of the last one since 1970.
    """

    newest: tuple[float, ...] = (UNKNOWN,) * QUARTERS
    before: tuple[float, ...] = (UNKNOWN,) * QUARTERS
    quarter: int = -1

    def observe(self, load: float, now: float) -> "DayPattern":
        """With the total load at `now`."""
        quarter = int(now // QUARTER_S)
        if quarter == self.quarter and load <= self.newest[quarter % QUARTERS]:
            return self
        if quarter == self.quarter:
            return replace(self, newest=_with(self.newest, quarter, load))
        known = self._forget(quarter)
        older = _with(known.before, quarter, known.newest[quarter % QUARTERS])
        return DayPattern(_with(known.newest, quarter, load), older, quarter)

    def expected(self, now: float, ahead: float) -> float | None:
        """The highest expected load of the quarters that begin within `ahead` seconds, scaled by how today compares.

        None: no quarter begins, or one is not known.
        """
        here = int(now // QUARTER_S)
        usual = self._usual(here - 1)
        lately = self.newest[(here - 1) % QUARTERS] if self.quarter >= here - 1 else UNKNOWN
        coming = [self._usual(at) for at in range(here + 1, int((now + ahead) // QUARTER_S) + 1)]
        known = [one for one in coming if one is not None]
        if usual is None or lately <= 0 or not known or len(known) < len(coming):
            return None
        ratio = min(_MOST_RATIO, max(_LEAST_RATIO, lately / usual)) if usual > 0 else 1.0
        return ratio * max(known)

    def _usual(self, quarter: int) -> float | None:
        """The lower of both days. For quarters that have begun the newest value is today's."""
        at = quarter % QUARTERS
        known = (self.before[at],) if quarter <= self.quarter else (self.newest[at], self.before[at])
        return None if UNKNOWN in known else min(known)

    def _forget(self, quarter: int) -> "DayPattern":
        """Without the quarters that had no figures since."""
        if self.quarter < 0 or quarter - self.quarter > QUARTERS:
            return DayPattern()
        known = self
        for missed in range(self.quarter + 1, quarter):
            older = _with(known.before, missed, known.newest[missed % QUARTERS])
            known = DayPattern(_with(known.newest, missed, UNKNOWN), older, missed)
        return known


def _with(values: tuple[float, ...], quarter: int, value: float) -> tuple[float, ...]:
    at = quarter % QUARTERS
    return (*values[:at], value, *values[at + 1 :])


SAMPLE_S = 60.0

Direction = Literal["up", "down"]


@dataclass(frozen=True, slots=True)
class StreamFigures:
    """One stream at one moment. layout: the open shards. slots: the load of each slot, a mean of the last windows.

    full: indexes of shards that refused entries or delayed them. covered: the age of this layout in seconds.
    changing: the stream is not ACTIVE. room: how many more shards the account may have. partial: some processes did
    not answer, so the load may be higher. ahead: wall clock minus clock of decisions.
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
    """at: when it was finished, or begun if it is not, by the clock of decisions."""

    at: float
    direction: Direction


@dataclass(frozen=True, slots=True)
class StreamMemory:
    """updates: of a rolling day, oldest first. samples: (time, load of each slot) of the last minutes, a minute apart."""

    updates: tuple[Update, ...] = ()
    samples: tuple[tuple[float, tuple[float, ...]], ...] = ()
    day: DayPattern = field(default_factory=DayPattern)

    def observe(self, figures: StreamFigures, now: float, window: float) -> "StreamMemory":
        """With these figures, and without what is too old or has another number of slots.

        While a shard refuses, its load is unknown, so the samples start again afterwards.
        """
        slots = figures.slots
        day = self.day.observe(sum(slots), now + figures.ahead)
        if figures.full:
            return StreamMemory(self.recent(now), (), day)
        samples = tuple(one for one in self.samples if one[0] > now - window and len(one[1]) == len(slots))
        if not samples or now - samples[-1][0] >= SAMPLE_S:
            samples = (*samples, (now, slots))
        return StreamMemory(self.recent(now), samples, day)

    def recent(self, now: float) -> tuple[Update, ...]:
        """The updates that count against the quota."""
        return tuple(one for one in self.updates if one.at > now - QUOTA_S)

    def with_update(self, direction: Direction, now: float) -> "StreamMemory":
        return replace(self, updates=(*self.updates, Update(now, direction)))

    def with_update_finished(self, now: float) -> "StreamMemory":
        """With the newest update as finished: quota and cool-down count from its end."""
        return replace(self, updates=(*self.updates[:-1], replace(self.updates[-1], at=now)))


@dataclass(frozen=True, slots=True)
class StreamDecision:
    """layout: the new layout; None: no change. reason: for a person, with figures.

    at_once: UpdateShardCount makes the layout, which is uniform. Else splits and merges do, one after the other.
    is_refused: more shards are needed, and cannot or must not be added.
    """

    layout: Layout | None
    reason: str
    at_once: bool = False
    is_refused: bool = False
