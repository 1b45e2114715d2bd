"""The day's pattern of a stream: the peak of each quarter of an hour, of the last two days.

What both days had at an hour is expected there again. One day alone predicts nothing: a crowd that came once does not
come every day.
"""

from dataclasses import dataclass, replace

QUARTER_S = 900.0
QUARTERS = 96
UNKNOWN = -1.0
_LEAST_RATIO, _MOST_RATIO = 0.5, 1.5


@dataclass(frozen=True, slots=True)
class DayPattern:
    """Immutable. Peaks are total loads, in shards; `UNKNOWN` where nobody looked. quarter: number since 1970 of the last."""

    newest: tuple[float, ...] = (UNKNOWN,) * QUARTERS
    before: tuple[float, ...] = (UNKNOWN,) * QUARTERS
    quarter: int = -1

    def observe(self, load: float, now: float) -> "DayPattern":
        """Take note of the total load at `now`."""
        quarter = int(now // QUARTER_S)
        if quarter == self.quarter and load <= self.newest[quarter % QUARTERS]:
            return self
        if quarter == self.quarter:
            return replace(self, newest=_with(self.newest, quarter, load))
        known = self._forget(quarter)
        older = _with(known.before, quarter, known.newest[quarter % QUARTERS])
        return DayPattern(_with(known.newest, quarter, load), older, quarter)

    def expected(self, now: float, ahead: float) -> float | None:
        """The highest load of the quarters that begin within `ahead` seconds, by both days, as today compares with them.

        None: no quarter begins, or it is not known.
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
        """What both days had then. Of quarters that have begun the newest figure is today's own."""
        at = quarter % QUARTERS
        known = (self.before[at],) if quarter <= self.quarter else (self.newest[at], self.before[at])
        return None if UNKNOWN in known else min(known)

    def _forget(self, quarter: int) -> "DayPattern":
        """Without the quarters in which nobody looked since."""
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
