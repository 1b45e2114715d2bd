"""Measures one group from the metrics of its instances."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping

from services.autoscaler.groups.backlog import LATE_S, Backlog
from services.autoscaler.groups.drivers.contract import Group, Member
from services.autoscaler.groups.members import Instance
from services.autoscaler.groups.observer_client import Lane
from services.autoscaler.groups.policy import GroupFigures
from services.core.group_control import Figures
from services.core.pipe_file.topic_names import RETRIER_GROUP
from services.core.process.scrape import Sample, scrape

FAILING_SHARE = 0.2
"""A receiver that fails this share of its requests causes lag, even while its breaker is closed."""
FEWEST_ATTEMPTS = 5
MOST_PRESSURE = 10.0
_ACCEPTED = ("delivered", "partial")
_REPORTER = "reporter"
"""With its address: in place of a member's name, which has no blank."""


class Meter:
    """Measures one group. Rates are since the call before."""

    def __init__(self) -> None:
        self._before: dict[str, Sample] = {}
        self._figures: tuple[float, dict[str, Figures]] = (0.0, {})
        """Of the instances without a management port, and when they were measured."""
        self._known_since: dict[str, tuple[float, float]] = {}
        """By instance: start of its process by its wall clock, and when we first saw that, by our monotonic clock."""

    async def measure(self, group: Group, failing: frozenset[Lane] | None, under_way: str | None) -> GroupFigures:
        """Ask every instance at once, for 15 s at most. failing: None when unknown; then lag is unknown."""
        addresses = {member.name: member.address for member in group.members if member.address is not None}
        addresses |= {f"{_REPORTER} {address}": address for address in group.reporters}
        found = await asyncio.gather(*(scrape([address]) for address in addresses.values()))
        samples = dict(zip(addresses, found, strict=True))
        before, self._before = self._before, samples
        self._known_since = {
            name: _update_known_since(sample, self._known_since.get(name)) for name, sample in samples.items()
        }
        figures, self._figures = self._figures, (time.monotonic(), _figures_of(group))
        instances = tuple(
            instance(one, samples.get(one.name), before.get(one.name), self._known_since.get(one.name))
            if one.figures is None
            else _instance_with(one, one.figures, figures[1].get(one.name), self._figures[0] - figures[0])
            for one in group.members
        )
        if failing is None:
            return GroupFigures(group.size, instances, under_way=under_way)
        pairs = [(sample, before[name]) for name, sample in samples.items() if name in before]
        bad = failing | failing_lanes(pairs)
        lag = oldest_lag(samples.values(), bad)
        pressed = pressure(pairs, bad) if lag is not None and lag >= LATE_S else 1.0
        return GroupFigures(group.size, instances, lag, pressed, under_way, find_backlogs(samples.values(), bad))


def _update_known_since(sample: Sample, known_since: tuple[float, float] | None) -> tuple[float, float]:
    started = sample.total("process_start_time_seconds")
    return known_since if known_since is not None and started in (0.0, known_since[0]) else (started, sample.at)


def instance(
    member: Member, sample: Sample | None, before: Sample | None, known_since: tuple[float, float] | None = None
) -> Instance:
    """One instance. Its CPU is unknown across a restart of its process.

    Its age is at least the time since we first saw it, so a wall clock that is set back does not make it young.
    """
    fault = next(iter(sample.unready.values()), None) if sample is not None else None
    if sample is None or not (started := sample.total("process_start_time_seconds")):
        return Instance(member.name, False, None, None, member.leaving, fault)
    cpu = None
    if before is not None and before.total("process_start_time_seconds") == started and sample.at > before.at:
        used = sample.total("process_cpu_seconds_total") - before.total("process_cpu_seconds_total")
        cpu = max(0.0, used / (sample.at - before.at))
    known_for = sample.at - known_since[1] if known_since is not None else 0.0
    age = max(known_for, time.time() - started)
    return Instance(member.name, not sample.unready, age, cpu, member.leaving, fault)


def _figures_of(group: Group) -> dict[str, Figures]:
    return {member.name: member.figures for member in group.members if member.figures is not None}


def _instance_with(member: Member, now: Figures, before: Figures | None, seconds: float) -> Instance:
    """An instance whose platform measured it, and so has seen it at work. seconds: since `before`."""
    is_same = before is not None and before.age <= now.age and seconds > 0
    cpu = max(0.0, now.cpu - before.cpu) / seconds if before is not None and is_same else None
    return Instance(member.name, True, now.age, cpu, member.leaving)


def failing_lanes(pairs: Iterable[tuple[Sample, Sample]]) -> frozenset[Lane]:
    """Lanes whose requests between the samples (new, old) failed too often."""
    requests: dict[Lane, float] = defaultdict(float)
    failed: dict[Lane, float] = defaultdict(float)
    for new, old in pairs:
        for (name, labels), value in new.values.items():
            if name != "penstock_expel_attempts_total":
                continue
            lane, count = _lane(dict(labels)), value - old.values.get((name, labels), 0.0)
            requests[lane] += count
            failed[lane] += count if dict(labels)["outcome"] not in _ACCEPTED else 0.0
    return frozenset(
        lane for lane, all_ in requests.items() if all_ >= FEWEST_ATTEMPTS and failed[lane] >= FAILING_SHARE * all_
    )


def oldest_lag(samples: Iterable[Sample], failing: frozenset[Lane]) -> float | None:
    """Age in s of the oldest unprocessed event, without failing lanes."""
    ages = [age for sample in samples for age in _lags(sample, "penstock_broker_lag_seconds", failing).values()]
    return max(ages, default=None)


def find_backlogs(samples: Iterable[Sample], failing: frozenset[Lane]) -> tuple[Backlog, ...]:
    """The lag of each partition, without failing lanes. Several instances may report one partition: the greatest counts."""
    records: dict[tuple[str, str, str], float] = {}
    seconds: dict[tuple[str, str, str], float] = {}
    for sample in samples:
        for metric, found in (("penstock_broker_lag_records", records), ("penstock_broker_lag_seconds", seconds)):
            for labels, value in _lags(sample, metric, failing).items():
                one = dict(labels)
                place = (one["group"], one["topic"], one["partition"])
                found[place] = max(value, found.get(place, 0.0))
    return tuple(
        Backlog(group, topic, int(partition), count, seconds.get((group, topic, partition), 0.0))
        for (group, topic, partition), count in records.items()
        if count > 0
    )


def pressure(pairs: Iterable[tuple[Sample, Sample]], failing: frozenset[Lane]) -> float:
    """Events in per event delivered between the samples (new, old), without failing lanes; from 1 to 10."""
    delivered = grown = 0.0
    for new, old in pairs:
        grown += sum(_lags(new, "penstock_broker_lag_records", failing).values())
        grown -= sum(_lags(old, "penstock_broker_lag_records", failing).values())
        delivered += _delivered(new, failing) - _delivered(old, failing)
    if delivered <= 0 or grown <= 0:
        return 1.0
    return min(MOST_PRESSURE, 1.0 + grown / delivered)


def _delivered(sample: Sample, failing: frozenset[Lane]) -> float:
    return sum(
        value
        for (name, labels), value in sample.values.items()
        if name == "penstock_expel_events_delivered_total" and _lane(dict(labels)) not in failing
    )


def _lane(labels: Mapping[str, str]) -> Lane:
    return labels["pipe"], labels["destination"]


def _lags(sample: Sample, metric: str, failing: frozenset[Lane]) -> dict[frozenset[tuple[str, str]], float]:
    """By partition, without the retrier's topics: events wait there on purpose."""
    skipped = {f"{pipe}.{destination}" for pipe, destination in failing} | {RETRIER_GROUP}
    return {
        labels: value
        for (name, labels), value in sample.values.items()
        if name == metric and dict(labels)["group"] not in skipped
    }
