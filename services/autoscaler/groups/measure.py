"""From what a group's instances say on their management ports to its figures."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping

from services.autoscaler.groups.drivers.contract import Group, Member
from services.autoscaler.groups.figures import Figures, Instance
from services.autoscaler.groups.observer import Lane
from services.core.pipes import RETRIER_GROUP
from services.core.scrape import Sample, scrape

FAILING_SHARE = 0.2
"""A receiver that fails so many of its requests is the reason for the lag, even while its breaker is closed."""
FEWEST_ATTEMPTS = 5
PRESSED_S = 5.0
"""Only events that wait for longer are more than a batch under way."""
MOST_PRESSURE = 10.0
_TAKEN = ("delivered", "partial")


class Meter:
    """Measures one group; rates are since the call before."""

    def __init__(self) -> None:
        self._before: dict[str, Sample] = {}
        self._met: dict[str, tuple[float, float]] = {}
        """By instance: when its process began, by its wall clock; and when that was first heard, by our monotonic one."""

    async def measure(self, group: Group, failing: frozenset[Lane] | None, under_way: str | None) -> Figures:
        """Ask every instance at once, up to 15 s. failing: None when it is not known; then nothing is said of lag."""
        addressed = [member for member in group.members if member.address is not None]
        found = await asyncio.gather(*(scrape([str(member.address)]) for member in addressed))
        samples = {member.name: sample for member, sample in zip(addressed, found, strict=True)}
        before, self._before = self._before, samples
        self._met = {name: _meet(sample, self._met.get(name)) for name, sample in samples.items()}
        instances = tuple(
            instance(one, samples.get(one.name), before.get(one.name), self._met.get(one.name)) for one in group.members
        )
        if failing is None:
            return Figures(group.size, instances, under_way=under_way)
        pairs = [(sample, before[name]) for name, sample in samples.items() if name in before]
        bad = failing | struggling(pairs)
        lag = oldest_wait(samples.values(), bad)
        pressed = pressure(pairs, bad) if lag is not None and lag >= PRESSED_S else 1.0
        return Figures(group.size, instances, lag, pressed, under_way)


def _meet(sample: Sample, met: tuple[float, float] | None) -> tuple[float, float]:
    """Its process' start, and when that was first heard."""
    started = sample.total("process_start_time_seconds")
    return met if met is not None and started in (0.0, met[0]) else (started, sample.at)


def instance(
    member: Member, sample: Sample | None, before: Sample | None, met: tuple[float, float] | None = None
) -> Instance:
    """One instance. CPU is not known across a restart of its process.

    It is at least as old as what we have known of it (met): a wall clock that is set back makes nobody young.
    """
    if sample is None or not (started := sample.total("process_start_time_seconds")):
        return Instance(member.name, False, None, None, member.leaving)
    cpu = None
    if before is not None and before.total("process_start_time_seconds") == started and sample.at > before.at:
        used = sample.total("process_cpu_seconds_total") - before.total("process_cpu_seconds_total")
        cpu = max(0.0, used / (sample.at - before.at))
    known_for = sample.at - met[1] if met is not None else 0.0
    return Instance(member.name, not sample.unready, max(known_for, time.time() - started), cpu, member.leaving)


def struggling(pairs: Iterable[tuple[Sample, Sample]]) -> frozenset[Lane]:
    """Lanes of which a good part of the requests between the samples (new, old) failed."""
    requests: dict[Lane, float] = defaultdict(float)
    failed: dict[Lane, float] = defaultdict(float)
    for new, old in pairs:
        for (name, labels), value in new.values.items():
            if name != "penstock_expel_attempts_total":
                continue
            told = dict(labels)
            lane, count = (told["pipe"], told["destination"]), value - old.values.get((name, labels), 0.0)
            requests[lane] += count
            failed[lane] += count if told["outcome"] not in _TAKEN else 0.0
    return frozenset(
        lane for lane, all_ in requests.items() if all_ >= FEWEST_ATTEMPTS and failed[lane] >= FAILING_SHARE * all_
    )


def oldest_wait(samples: Iterable[Sample], failing: frozenset[Lane]) -> float | None:
    """Age in s of the oldest event that a group of readers has not processed, those of failing lanes left out."""
    ages = [age for sample in samples for age in _lags(sample, "penstock_broker_lag_seconds", failing).values()]
    return max(ages, default=None)


def pressure(pairs: Iterable[tuple[Sample, Sample]], failing: frozenset[Lane]) -> float:
    """Events that came in per event delivered between the samples (new, old), for lanes that are well; from 1 to 10."""
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
    """By partition. The retrier's topics are left out: to wait there is what they are for."""
    skipped = {f"{pipe}.{destination}" for pipe, destination in failing} | {RETRIER_GROUP}
    return {
        labels: value
        for (name, labels), value in sample.values.items()
        if name == metric and dict(labels)["group"] not in skipped
    }
