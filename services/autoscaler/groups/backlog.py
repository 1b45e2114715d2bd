"""Where a group's lag is. Lag in fewer partitions than instances is not answered with instances: a partition has one reader.

Pure functions of figures.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SHARE = 0.9
"""The partitions that hold this share of the records behind count as the place of the lag."""
LATE_S = 5.0
"""Events that wait for less are a batch under way."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """The lag of one consumer group in one partition. records: behind. seconds: age of the oldest of them."""

    group: str
    topic: str
    partition: int
    records: float
    seconds: float


@dataclass(frozen=True, slots=True)
class HotPartitions:
    """Lag that more instances cannot reduce.

    hottest: the partition with the most records behind. share: its part of the group's records behind, 0..1. partitions: so
    many have almost all of them.
    """

    hottest: Backlog
    share: float
    partitions: int

    @property
    def words(self) -> str:
        """For a person."""
        one = self.hottest
        place = f"partition {one.partition} of {one.topic} (group {one.group})"
        if self.partitions == 1:
            return f"{place} has {self.share:.0%} of the lag: {one.records:.0f} records, {one.seconds:.0f} s"
        return f"{self.partitions} partitions have the lag; the most, {self.share:.0%} and {one.seconds:.0f} s, {place}"


@dataclass(frozen=True, slots=True)
class Lateness:
    """helped: the greatest lag, in s, that more instances may reduce. hot: the greatest that they cannot; None without any."""

    helped: float
    hot: HotPartitions | None


def measure_lateness(backlogs: Iterable[Backlog], cpus: Sequence[float], idle_below: float) -> Lateness:
    """cpus: of the working instances. More instances do not reduce a consumer group's lag when it is in fewer partitions than
    there are working instances, and the instances without these partitions use at most `idle_below` cores on average."""
    late: defaultdict[str, list[Backlog]] = defaultdict(list)
    for one in backlogs:
        if one.records > 0 and one.seconds >= LATE_S:
            late[one.group].append(one)
    helped, hot = 0.0, list[HotPartitions]()
    for found in late.values():
        place = _place(found)
        if len(place) < len(cpus) and _others(cpus, len(place)) <= idle_below:
            total = sum(one.records for one in found)
            hot.append(HotPartitions(place[0], place[0].records / total, len(place)))
        else:
            helped = max(helped, *(one.seconds for one in found))
    return Lateness(helped, max(hot, key=lambda one: one.hottest.seconds, default=None))


def _place(found: Iterable[Backlog]) -> list[Backlog]:
    """The fewest partitions that hold SHARE of the records, the fullest first."""
    ordered = sorted(found, key=lambda one: (-one.records, one.topic, one.partition))
    wanted, place = SHARE * sum(one.records for one in ordered), list[Backlog]()
    for one in ordered:
        place.append(one)
        wanted -= one.records
        if wanted <= 0:
            break
    return place


def _others(cpus: Sequence[float], owners: int) -> float:
    """The average CPU without that of the busiest instances: these have the partitions, as far as we can know."""
    others = sorted(cpus)[: len(cpus) - owners]
    return sum(others) / len(others)
