"""The loop: look at each group, decide, tell why, carry it out."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import replace

import structlog

from services.autoscaler.groups.drivers.contract import Away, DriverError, GroupDriver
from services.autoscaler.groups.figures import Figures
from services.autoscaler.groups.measure import Meter
from services.autoscaler.groups.observer import Observed, ObserverAway, ObserverClient, Window, action_of
from services.autoscaler.groups.policy import Decision, State, decide
from services.autoscaler.groups.rules import GroupRules
from services.core import metrics

log = structlog.get_logger()


class GroupScaler:
    """Looks after the groups of one platform. Owns nothing that must survive it: the last actions are the observer's to know."""

    def __init__(
        self, rules: Mapping[str, GroupRules], driver: GroupDriver, observer: ObserverClient, dry_run: bool
    ) -> None:
        self._driver, self._observer, self._dry_run = driver, observer, dry_run
        self._rules = dict(rules)
        self._meters = {name: Meter() for name in rules}
        self._states: dict[str, State] = {}
        self._known: dict[str, Window] = {}

    async def run(self, stopping: asyncio.Event, every: float) -> None:
        """Look every so many seconds until the stop, which waits for no platform: an order was given by then, or was not."""
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self._look_on(every), name="looks")
            await stopping.wait()
            looking.cancel()

    async def _look_on(self, every: float) -> None:
        while True:
            await self.look()
            await asyncio.sleep(every)

    async def look(self) -> None:
        """One look at every group, at once."""
        observed = await self._observe()
        await asyncio.gather(*(self._look(name, observed) for name in self._rules))

    async def _observe(self) -> Observed | None:
        try:
            return await self._observer.read()
        except ObserverAway as error:
            log.warning(
                "observer_away", error=str(error), hint="groups do not shrink, and lag does not count, until it answers"
            )
            return None

    async def _look(self, name: str, observed: Observed | None) -> None:
        now = time.monotonic()
        state = self._recall(name, observed, now)
        try:
            group = await self._driver.look(name)
        except DriverError as error:
            self._fail(name, "look", error)
            self._states[name] = replace(state, since=None, needs=())  # what happened meanwhile is not known
            return
        under_way = observed.under_way(time.time()) if observed is not None else "the observer does not answer"
        failing = observed.failing if observed is not None else None
        figures = await self._meters[name].measure(group, failing, under_way)
        decision, self._states[name] = decide(self._rules[name], figures, state, now)
        self._tell(name, decision, figures)
        if decision.action != "hold" and not self._dry_run and not await self._carry_out(name, decision, figures.size):
            self._states[name] = replace(self._states[name], last=state.last, acted_at=state.acted_at)

    def _recall(self, name: str, observed: Observed | None, now: float) -> State:
        """The state, with what another autoscaler, or the one before this, did since.

        Each announcement is placed on our clock once, so a wall clock that is set back puts nothing off again and again.
        """
        state = self._states.get(name, State())
        window = observed.last_window(name) if observed is not None else None
        if window is None or window == self._known.get(name):
            return state
        self._known[name] = window
        acted_at = now - max(0.0, time.time() - window.began)
        if state.last is not None and acted_at <= state.acted_at:
            return state
        return replace(state, last=action_of(window), acted_at=acted_at)

    async def _carry_out(self, name: str, decision: Decision, seen: int) -> bool:
        """Whether the platform took the order, or may have: an answer that was lost says nothing about the order."""
        try:
            await self._driver.resize(name, seen, decision.size)
        except DriverError as error:
            self._fail(name, "resize", error)
            if not isinstance(error, Away):
                return False
        seconds = self._rules[name].warm_up + self._rules[name].cool_down
        try:
            self._known[name] = await self._observer.announce(
                name, decision.action, f"{seen} -> {decision.size}", seconds
            )
        except ObserverAway as error:
            log.warning("not_announced", group=name, error=str(error))
        return True

    def _fail(self, name: str, what: str, error: DriverError) -> None:
        metrics.AUTOSCALER_GROUP_FAILURES.labels(name, what, type(error).__name__).inc()
        log.warning("group_not_reached", group=name, what=what, kind=type(error).__name__, error=str(error))

    def _tell(self, name: str, decision: Decision, figures: Figures) -> None:
        """Every decision, with its reason and its figures."""
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
