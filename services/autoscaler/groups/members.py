"""The state of each instance of a group: working, starting, leaving or failed. Pure functions of figures, memory and time.

An instance that starts, is silent or leaves makes the group wait, but not for ever: after `failed_after` it counts as failed.
The group then decides without it.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

State = Literal["working", "starting", "leaving", "failed"]
STATES: tuple[State, ...] = ("working", "starting", "leaving", "failed")

LOOP_STARTS = 3
"""An instance that was started so often again within LOOP_WINDOWS times `failed_after` has failed, although it works in between.
It counts as working again when its process is as old as `failed_after`."""
LOOP_WINDOWS = 3
_AGE_ERROR_S = 2.0
"""Two measurements of the start of one process may differ by so much."""


@dataclass(frozen=True, slots=True)
class Instance:
    """age: seconds since its process began. cpu: cores used on average since the last measurement. None: unknown.

    fault: the reason why it is not ready, for a person; None when it is ready or the reason is unknown.
    """

    name: str
    ready: bool
    age: float | None
    cpu: float | None
    leaving: bool = False
    """It drains, or was ordered to."""
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Watched:
    """What is remembered of an instance. Times are of the caller's clock, in seconds.

    worked: it has worked since we first saw it. since: it has not worked since then; None: it works. leaving_since,
    silent_since: it leaves, or does not answer, since then; None: it does not. began: the start of its process. starts: the
    times at which we saw that its process is another one.
    """

    name: str
    worked: bool = False
    since: float | None = None
    leaving_since: float | None = None
    silent_since: float | None = None
    began: float | None = None
    starts: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """words: what is wrong with it, for a person. worked: it worked before. given_up: it leaves and is silent, so nobody waits
    for it."""

    name: str
    words: str
    leaving: bool
    worked: bool
    given_up: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.words})"


@dataclass(frozen=True, slots=True)
class Members:
    """The instances by state. absent: so many were ordered and have not appeared for `failed_after`."""

    working: tuple[Instance, ...]
    starting: tuple[str, ...]
    leaving: tuple[str, ...]
    failed: tuple[Failed, ...]
    absent: int

    @property
    def staying_failed(self) -> tuple[Failed, ...]:
        """The failed ones that were not ordered to leave."""
        return tuple(one for one in self.failed if not one.leaving)

    @property
    def given_up(self) -> frozenset[str]:
        """Leaving instances for which nobody waits."""
        return frozenset(one.name for one in self.failed if one.given_up)

    @property
    def still_draining(self) -> str | None:
        """An overdue instance that leaves and still answers: it may have events in flight."""
        return next((one.name for one in self.failed if one.leaving and not one.given_up), None)

    @property
    def missing(self) -> int:
        """How many of the ordered instances do not work and will not."""
        return len(self.staying_failed) + self.absent

    @property
    def useless(self) -> int:
        """How many of the ordered instances have never worked: evidence that a new one would not work either."""
        return sum(not one.worked for one in self.staying_failed) + self.absent

    @property
    def words(self) -> str:
        """The failed instances, for a person; empty without any."""
        shown = [str(one) for one in self.failed[:5]]
        more = len(self.failed) - len(shown)
        if more:
            shown.append(f"{more} more")
        if self.absent:
            shown.append(f"{self.absent} that never appeared")
        return ", ".join(shown)

    def count(self, state: State) -> int:
        """For the metric."""
        if state == "failed":
            return len(self.failed) + self.absent
        found: dict[State, int] = {
            "working": len(self.working),
            "starting": len(self.starting),
            "leaving": len(self.leaving),
        }
        return found[state]


def is_settled(one: Instance, warm_up: float) -> bool:
    """Whether it works: it answers, is ready, and has warmed up."""
    return one.ready and not one.leaving and one.cpu is not None and one.age is not None and one.age >= warm_up


def watch(
    instances: Iterable[Instance], before: Iterable[Watched], now: float, warm_up: float, failed_after: float
) -> tuple[Watched, ...]:
    """The memory with the present figures. Instances that are gone are forgotten."""
    known = {one.name: one for one in before}
    return tuple(_watch_one(one, known.get(one.name), now, warm_up, failed_after) for one in instances)


def _watch_one(one: Instance, old: Watched | None, now: float, warm_up: float, failed_after: float) -> Watched:
    old = Watched(one.name) if old is None else old
    settled, began = is_settled(one, warm_up), old.began
    starts = tuple(at for at in old.starts if at > now - LOOP_WINDOWS * failed_after)
    if one.age is not None:
        if began is not None and now - one.age > began + _AGE_ERROR_S:
            starts = (*starts[-LOOP_STARTS:], now)
        began = now - one.age
    return Watched(
        one.name,
        old.worked or settled,
        None if settled else _since(old.since, now),
        _since(old.leaving_since, now) if one.leaving else None,
        _since(old.silent_since, now) if one.age is None else None,
        began,
        starts,
    )


def _since(before: float | None, now: float) -> float:
    return now if before is None else before


def sort(
    instances: Iterable[Instance], watched: Iterable[Watched], absent: int, now: float, failed_after: float
) -> Members:
    """The instances by state. watched: from `watch`, of the same instances."""
    known = {one.name: one for one in watched}
    working: list[Instance] = []
    starting: list[str] = []
    leaving: list[str] = []
    failed: list[Failed] = []
    for one in instances:
        seen = known[one.name]
        if (found := _failure(one, seen, now, failed_after)) is not None:
            failed.append(found)
        elif one.leaving:
            leaving.append(one.name)
        elif seen.since is not None:
            starting.append(one.name)
        else:
            working.append(one)
    return Members(tuple(working), tuple(starting), tuple(leaving), tuple(failed), absent)


def _failure(one: Instance, seen: Watched, now: float, failed_after: float) -> Failed | None:
    if seen.leaving_since is not None:
        if now - seen.leaving_since < failed_after:
            return None
        is_silent = seen.silent_since is not None and now - seen.silent_since >= failed_after
        words = f"leaving for {_minutes(now - seen.leaving_since)}, {'silent' if is_silent else 'still answers'}"
        return Failed(one.name, words, True, seen.worked, is_silent)
    if len(seen.starts) >= LOOP_STARTS and (one.age is None or one.age < failed_after):
        return Failed(one.name, f"started again {len(seen.starts)} times", False, seen.worked)
    if seen.since is None or now - seen.since < failed_after:
        return None
    return Failed(one.name, f"{_fault(one)} for {_minutes(now - seen.since)}", False, seen.worked)


def _fault(one: Instance) -> str:
    if one.age is None:
        return "silent"
    return "starting again and again" if one.ready else f"not ready: {one.fault or 'no reason given'},"


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min"


def forget(watched: Iterable[Watched], name: str) -> tuple[Watched, ...]:
    """The memory without an instance: what comes in its place is watched from its beginning."""
    return tuple(one for one in watched if one.name != name)
