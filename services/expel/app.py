"""Expel as a service: one lane per destination, all on one event loop, and a management port."""

import asyncio
import gc
import os
import resource
from collections.abc import Sequence
from contextlib import AsyncExitStack

import structlog

from services.core.broker.producer import Producer
from services.core.lifecycle import Supervision
from services.core.management import serve_management
from services.core.opening import open_when_reachable
from services.core.pauses import Pauses
from services.expel.lane import Lane
from services.expel.plan import LaneBuilder, LanePlan, read_plan, touched_topics, watch_secrets
from services.expel.removed import RemovedLane
from services.expel.settings import ExpelSettings

log = structlog.get_logger()

_DRAIN_SHARE = 0.6
"""Of the drain time, for requests under way; the rest is for committing, leaving the groups and closing."""
_OTHER_FILES = 200
"""Open files for logs, the broker and its files."""
_GC_YOUNG_OBJECTS = 50_000


class Expel:
    """The running service, as the management port sees it."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self.reason: str | None = "starting"

    def note(self, reason: str) -> None:
        """Why it is not ready."""
        self.reason = reason

    def ready(self) -> str | None:
        """None when every lane runs or is paused, else why not."""
        return self.reason or next((lane.waits_for for lane in self.lanes if lane.waits_for), None)


async def start(settings: ExpelSettings, supervision: Supervision) -> None:
    """Run until the stop, then drain. Raises BadConfiguration; everything else is waited out or ends the process."""
    plan = await asyncio.to_thread(read_plan, settings, dict(os.environ))
    plans = plan.lanes
    _raise_file_limit(plans)
    calm_collector()
    expel, stopping = Expel(), supervision.stopping
    async with AsyncExitStack() as stack:
        management = await stack.enter_async_context(serve_management(settings.management, expel.ready))
        log.info("started", management=management, lanes=len(plans))
        broker = await open_when_reachable(
            stack, settings.broker, stopping, topics=touched_topics(plans), tell=expel.note
        )
        if broker is None:
            return
        producer = await stack.enter_async_context(Producer(broker.driver))
        pauses = Pauses(broker.admin)
        if any(plan.destination.webhook is not None for plan in plans):
            supervision.run(pauses.follow(stopping), "pauses")
        builder = LaneBuilder(settings, broker, producer, pauses, stack, len(plans))
        expel.lanes = [builder.build(plan) for plan in plans]
        for watch in watch_secrets(plans, settings.pipes.parent):
            supervision.run(watch.run(stopping), "signing secret")
        gone = [RemovedLane(broker, producer, lane, choice) for lane, choice in plan.removed.items()]
        expel.reason = None
        drain = settings.drain * _DRAIN_SHARE
        running = [supervision.run(lane.run(stopping, drain), f"lane {lane.name}") for lane in expel.lanes]
        running += [supervision.run(lane.run(stopping), f"removed {lane.name}") for lane in gone]
        await stopping.wait()
        expel.reason = "stopping"
        if running:
            await asyncio.wait(running)
        if cut_short := [lane.name for lane in expel.lanes if not lane.is_drained]:
            supervision.cut_short(f"requests under way: {', '.join(cut_short)}")


def _raise_file_limit(plans: Sequence[LanePlan]) -> None:
    """As far as the system allows; what is missing then costs throughput, never an event (`own_limits`)."""
    connections = sum(plan.destination.webhook.concurrency for plan in plans if plan.destination.webhook is not None)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft < wanted:
        log.warning(
            "few_files", limit=soft, wanted=wanted, hint="Try: ulimit -n, a lower concurrency, or more instances"
        )


def calm_collector() -> None:
    """Deliveries make many objects and no cycles; Python's default would look for cycles many times a second."""
    gc.freeze()
    gc.set_threshold(_GC_YOUNG_OBJECTS, 20, 50)
