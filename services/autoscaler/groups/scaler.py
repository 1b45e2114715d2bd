"""Scales each group: measures it, decides, logs and reports the decision, orders the size, announces it."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

import structlog

from services.autoscaler.groups.backlog import HotPartitions
from services.autoscaler.groups.drivers.contract import Away, DriverError, Group, GroupDriver
from services.autoscaler.groups.members import STATES
from services.autoscaler.groups.meter import Meter
from services.autoscaler.groups.observer_client import (
    Observed,
    ObserverClient,
    ObserverUnavailable,
    PlannedChange,
    action_of,
)
from services.autoscaler.groups.policy import GroupDecision, GroupFigures, GroupMemory, GroupRules, decide
from services.autoscaler.groups.topics import Topics
from services.core import metrics
from services.core.control.freezes import ON_PLATFORM
from services.core.group_report import GroupReport
from services.core.process.lifecycle import run_until

log = structlog.get_logger()


class GroupScaler:
    """Scales the groups of one platform. Has no state to save: the observer stores the last actions.

    topics: has the freezes, and the keys of hot partitions.
    """

    def __init__(
        self,
        rules: Mapping[str, GroupRules],
        driver: GroupDriver,
        observer: ObserverClient,
        topics: Topics,
        dry_run: bool,
    ) -> None:
        self._driver, self._observer, self._topics, self._dry_run = driver, observer, topics, dry_run
        self._is_reporting = True
        self._hot: dict[str, tuple[str, ...]] = {}
        """By group: the labels of its hot partition's metric."""
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
        await self._topics.refresh()
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
        figures = replace(figures, frozen=self._frozen(name, group))
        decision, self._states[name] = decide(self._rules[name], figures, state, now)
        decision = replace(decision, words=await self._add_words(name, decision))
        self._set_metrics(name, decision, figures)
        self._log(name, decision, figures)
        await self._report(name, decision, figures)
        if decision.action != "hold" and not self._dry_run and not await self._carry_out(name, decision, figures.size):
            watched = self._states[name].watched if decision.action != "replace" else state.watched
            self._states[name] = replace(
                self._states[name], last=state.last, acted_at=state.acted_at, watched=watched, replaced=state.replaced
            )

    def _frozen(self, name: str, group: Group) -> str | None:
        """Who froze the group and why; None when nobody did."""
        if group.problem is not None:
            metrics.AUTOSCALER_GROUP_FAILURES.labels(name, "freeze", "Refused").inc()
            log.warning("freeze_unknown", group=name, error=group.problem)
        if group.frozen is not None:
            return f"{ON_PLATFORM} because: {group.frozen}"
        return self._topics.frozen(name)

    async def _add_words(self, name: str, decision: GroupDecision) -> str:
        key = (
            await self._topics.find_key(decision.hot.hottest)
            if decision.reason == "hot_partition" and decision.hot
            else None
        )
        return "; ".join(part for part in (decision.words, key, self._topics.ended(name)) if part)

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

    async def _carry_out(self, name: str, decision: GroupDecision, seen: int) -> bool:
        """Whether the platform accepted the order, or may have: a lost answer says nothing about the order."""
        members = decision.members
        failed = members.given_up | {one.name for one in members.staying_failed}
        what, words = "resize", f"{seen} -> {decision.size}"
        try:
            if decision.instance is not None:
                what, words = "replace", decision.instance
                await self._driver.replace(name, decision.instance, failed)
            else:
                await self._driver.resize(name, seen, decision.size, failed)
        except DriverError as error:
            self._report_failure(name, what, error)
            if not isinstance(error, Away):
                return False
        seconds = self._rules[name].warm_up + self._rules[name].cool_down
        try:
            self._known[name] = await self._observer.announce(name, decision.action, words, seconds)
        except ObserverUnavailable as error:
            log.warning("not_announced", group=name, error=str(error))
        return True

    def _report_failure(self, name: str, what: str, error: DriverError) -> None:
        metrics.AUTOSCALER_GROUP_FAILURES.labels(name, what, type(error).__name__).inc()
        log.warning("group_not_reached", group=name, what=what, kind=type(error).__name__, error=str(error))

    async def _report(self, name: str, decision: GroupDecision, figures: GroupFigures) -> None:
        """To the observer. The first of several failures is logged."""
        members = decision.members
        report = GroupReport(
            name,
            round(time.time() * 1000),
            figures.size,
            decision.size,
            decision.action,
            decision.reason,
            decision.words,
            members.count("working"),
            members.count("starting"),
            members.count("leaving"),
            tuple(map(str, members.failed)) + (f"{members.absent} that never appeared",) * bool(members.absent),
            figures.frozen,
            decision.hot.words if decision.hot is not None else None,
            self._dry_run,
        )
        try:
            await self._observer.report(report)
            self._is_reporting = True
        except ObserverUnavailable as error:
            if self._is_reporting:
                log.warning("not_reported", group=name, error=str(error), hint="the observer's page shows old figures")
            self._is_reporting = False

    def _set_metrics(self, name: str, decision: GroupDecision, figures: GroupFigures) -> None:
        known = [one.cpu for one in figures.instances if one.cpu is not None and not one.leaving]
        metrics.AUTOSCALER_GROUP_DECISIONS.labels(name, decision.action, decision.reason).inc()
        metrics.AUTOSCALER_GROUP_SIZE.labels(name).set(figures.size)
        metrics.AUTOSCALER_GROUP_FROZEN.labels(name).set(figures.frozen is not None)
        for state in STATES:
            metrics.AUTOSCALER_GROUP_MEMBERS.labels(name, state).set(decision.members.count(state))
        if known:
            metrics.AUTOSCALER_GROUP_CPU.labels(name).set(sum(known) / len(known))
        self._set_hot(name, decision.hot)

    def _set_hot(self, name: str, hot: HotPartitions | None) -> None:
        """One partition for each group: the one before has no metric any more."""
        labels = None
        if hot is not None:
            one = hot.hottest
            labels = (name, one.group, one.topic, str(one.partition))
            metrics.AUTOSCALER_HOT_PARTITION.labels(*labels).set(one.seconds)
        before = self._hot.pop(name, None)
        if before is not None and before != labels:
            metrics.AUTOSCALER_HOT_PARTITION.remove(*before)
        if labels is not None:
            self._hot[name] = labels

    def _log(self, name: str, decision: GroupDecision, figures: GroupFigures) -> None:
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
            failed=[one.name for one in decision.members.failed],
            lag_seconds=figures.lag,
            pressure=round(figures.pressure, 2),
            under_way=figures.under_way,
            frozen=figures.frozen,
            dry_run=self._dry_run,
        )
