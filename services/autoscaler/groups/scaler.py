"""Scales each group: measures it, decides, logs the decision, orders the size, announces it."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

import structlog

from services.autoscaler.groups.drivers.contract import Away, DriverError, Group, GroupDriver, Member
from services.autoscaler.groups.observer import (
    Lane,
    Observed,
    ObserverClient,
    ObserverUnavailable,
    PlannedChange,
    action_of,
)
from services.autoscaler.groups.policy import GroupDecision, GroupFigures, GroupMemory, GroupRules, Instance, decide
from services.core import metrics
from services.core.lifecycle import run_until
from services.core.pipes import RETRIER_GROUP
from services.core.scrape import Sample, scrape

FAILING_SHARE = 0.2
"""A receiver that fails this share of its requests causes lag, even while its breaker is closed."""
FEWEST_ATTEMPTS = 5
PRESSED_S = 5.0
"""Events that wait for less are a batch under way."""
MOST_PRESSURE = 10.0
_ACCEPTED = ("delivered", "partial")


class Meter:
    """Measures one group. Rates are since the call before."""

    def __init__(self) -> None:
        self._before: dict[str, Sample] = {}
        self._known_since: dict[str, tuple[float, float]] = {}
        """By instance: start of its process by its wall clock, and when we first saw that, by our monotonic clock."""

    async def measure(self, group: Group, failing: frozenset[Lane] | None, under_way: str | None) -> GroupFigures:
        """Ask every instance at once, for 15 s at most. failing: None when unknown; then lag is unknown."""
        addressed = [member for member in group.members if member.address is not None]
        found = await asyncio.gather(*(scrape([str(member.address)]) for member in addressed))
        samples = {member.name: sample for member, sample in zip(addressed, found, strict=True)}
        before, self._before = self._before, samples
        self._known_since = {
            name: _update_known_since(sample, self._known_since.get(name)) for name, sample in samples.items()
        }
        instances = tuple(
            instance(one, samples.get(one.name), before.get(one.name), self._known_since.get(one.name))
            for one in group.members
        )
        if failing is None:
            return GroupFigures(group.size, instances, under_way=under_way)
        pairs = [(sample, before[name]) for name, sample in samples.items() if name in before]
        bad = failing | failing_lanes(pairs)
        lag = oldest_lag(samples.values(), bad)
        pressed = pressure(pairs, bad) if lag is not None and lag >= PRESSED_S else 1.0
        return GroupFigures(group.size, instances, lag, pressed, under_way)


def _update_known_since(sample: Sample, known_since: tuple[float, float] | None) -> tuple[float, float]:
    started = sample.total("process_start_time_seconds")
    return known_since if known_since is not None and started in (0.0, known_since[0]) else (started, sample.at)


def instance(
    member: Member, sample: Sample | None, before: Sample | None, known_since: tuple[float, float] | None = None
) -> Instance:
    """One instance. Its CPU is unknown across a restart of its process.

    Its age is at least the time since we first saw it, so a wall clock that is set back does not make it young.
    """
    if sample is None or not (started := sample.total("process_start_time_seconds")):
        return Instance(member.name, False, None, None, member.leaving)
    cpu = None
    if before is not None and before.total("process_start_time_seconds") == started and sample.at > before.at:
        used = sample.total("process_cpu_seconds_total") - before.total("process_cpu_seconds_total")
        cpu = max(0.0, used / (sample.at - before.at))
    known_for = sample.at - known_since[1] if known_since is not None else 0.0
    return Instance(member.name, not sample.unready, max(known_for, time.time() - started), cpu, member.leaving)


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


log = structlog.get_logger()


class GroupScaler:
    """Scales the groups of one platform. Has no state to save: the observer stores the last actions."""

    def __init__(
        self, rules: Mapping[str, GroupRules], driver: GroupDriver, observer: ObserverClient, dry_run: bool
    ) -> None:
        self._driver, self._observer, self._dry_run = driver, observer, dry_run
        self._rules = dict(rules)
        self._meters = {name: Meter() for name in rules}
        self._states: dict[str, GroupMemory] = {}
        self._known: dict[str, PlannedChange] = {}

    async def run(self, stopping: asyncio.Event, every: float) -> None:
        """Until the stop, which does not wait for the platform: an order was given by then, or was not."""
        await run_until(stopping, self._run_forever(every))

    async def _run_forever(self, every: float) -> None:
        while True:
            await self.scale_all()
            await asyncio.sleep(every)

    async def scale_all(self) -> None:
        observed = await self._observe()
        await asyncio.gather(*(self._scale(name, observed) for name in self._rules))

    async def _observe(self) -> Observed | None:
        try:
            return await self._observer.read()
        except ObserverUnavailable as error:
            log.warning(
                "observer_away", error=str(error), hint="groups do not shrink, and lag does not count, until it answers"
            )
            return None

    async def _scale(self, name: str, observed: Observed | None) -> None:
        now = time.monotonic()
        state = self._restore_last_action(name, observed, now)
        try:
            group = await self._driver.describe(name)
        except DriverError as error:
            self._report_failure(name, "look", error)
            self._states[name] = replace(state, since=None, needs=())  # the figures have a gap
            return
        under_way = observed.under_way(time.time()) if observed is not None else "the observer does not answer"
        failing = observed.failing if observed is not None else None
        figures = await self._meters[name].measure(group, failing, under_way)
        decision, self._states[name] = decide(self._rules[name], figures, state, now)
        self._report(name, decision, figures)
        if decision.action != "hold" and not self._dry_run and not await self._resize(name, decision, figures.size):
            self._states[name] = replace(self._states[name], last=state.last, acted_at=state.acted_at)

    def _restore_last_action(self, name: str, observed: Observed | None, now: float) -> GroupMemory:
        """The state, with the last action of any autoscaler since.

        Each announcement is placed on our clock once, so a wall clock that is set back delays actions once.
        """
        state = self._states.get(name, GroupMemory())
        window = observed.last_change(name) if observed is not None else None
        if window is None or window == self._known.get(name):
            return state
        self._known[name] = window
        acted_at = now - max(0.0, time.time() - window.began)
        if state.last is not None and acted_at <= state.acted_at:
            return state
        return replace(state, last=action_of(window), acted_at=acted_at)

    async def _resize(self, name: str, decision: GroupDecision, seen: int) -> bool:
        """Whether the platform accepted the order, or may have: a lost answer says nothing about the order."""
        try:
            await self._driver.resize(name, seen, decision.size)
        except DriverError as error:
            self._report_failure(name, "resize", error)
            if not isinstance(error, Away):
                return False
        seconds = self._rules[name].warm_up + self._rules[name].cool_down
        try:
            self._known[name] = await self._observer.announce(
                name, decision.action, f"{seen} -> {decision.size}", seconds
            )
        except ObserverUnavailable as error:
            log.warning("not_announced", group=name, error=str(error))
        return True

    def _report_failure(self, name: str, what: str, error: DriverError) -> None:
        metrics.AUTOSCALER_GROUP_FAILURES.labels(name, what, type(error).__name__).inc()
        log.warning("group_not_reached", group=name, what=what, kind=type(error).__name__, error=str(error))

    def _report(self, name: str, decision: GroupDecision, figures: GroupFigures) -> None:
        known = [one.cpu for one in figures.instances if one.cpu is not None and not one.leaving]
        cpu = sum(known) / len(known) if known else None
        metrics.AUTOSCALER_GROUP_DECISIONS.labels(name, decision.action, decision.reason).inc()
        metrics.AUTOSCALER_GROUP_SIZE.labels(name).set(figures.size)
        if cpu is not None:
            metrics.AUTOSCALER_GROUP_CPU.labels(name).set(cpu)
        log.info(
            "group_decision",
            group=name,
            action=decision.action,
            reason=decision.reason,
            words=decision.words,
            size=figures.size,
            wanted=decision.size,
            instances={one.name: None if one.cpu is None else round(one.cpu, 3) for one in figures.instances},
            leaving=[one.name for one in figures.instances if one.leaving],
            lag_seconds=figures.lag,
            pressure=round(figures.pressure, 2),
            under_way=figures.under_way,
            dry_run=self._dry_run,
        )
