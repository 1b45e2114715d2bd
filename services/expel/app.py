"""Expel as a service: one lane per destination, all on one event loop, and a management port."""

import asyncio
import os
from contextlib import AsyncExitStack

import structlog

from services.core.broker.producer import Producer
from services.core.control.pauses import Pauses
from services.core.process.lifecycle import Supervision
from services.core.process.management import serve_management
from services.core.process.progress import ProgressWatch
from services.core.process.startup import Readiness, open_when_reachable, raise_file_limit, tune_garbage_collector
from services.expel.plan import LaneBuilder, read_plan, touched_topics, watch_secrets
from services.expel.removed import RemovedLane, RemovedPipe
from services.expel.settings import ExpelSettings

log = structlog.get_logger()

_DRAIN_SHARE = 0.6
"""Share of the drain time for open requests. The rest is for commits, leaving the groups and closing."""


async def start(settings: ExpelSettings, supervision: Supervision) -> None:
    """Run until the stop, then drain. Raises BadConfiguration."""
    plan = await asyncio.to_thread(read_plan, settings, dict(os.environ))
    plans = plan.lanes
    raise_file_limit(
        sum(plan.destination.webhook.concurrency for plan in plans if plan.destination.webhook is not None)
    )
    tune_garbage_collector()
    readiness, progress, stopping = Readiness(), ProgressWatch(), supervision.stopping
    async with AsyncExitStack() as stack:
        management = await stack.enter_async_context(
            serve_management(settings.management, readiness.why_not, why_not_alive=progress.why_not_alive)
        )
        log.info("started", management=management, lanes=len(plans))
        broker = await open_when_reachable(
            stack,
            settings.broker,
            stopping,
            topics=touched_topics(plans),
            rights=plan.rights,
            on_wait=readiness.set_reason,
            pipes=plan.pipes,
        )
        if broker is None:
            return
        producer = await stack.enter_async_context(Producer(broker.appender))
        pauses = Pauses(broker.reader, plan.renames)
        if any(plan.destination.webhook is not None for plan in plans):
            supervision.run(pauses.follow(stopping), "pauses")
        builder = LaneBuilder(settings, broker, producer, pauses, stack, len(plans))
        if any(plan.destination.stream is not None for plan in plans):
            await builder.marker.load()
            if (
                broker.resharding is None
            ):  # otherwise nobody adds partitions, and each read takes from the shard's limit
                supervision.run(builder.marker.run(stopping), "key marks")
        lanes = [builder.build(plan) for plan in plans]
        readiness.check = lambda: next((lane.waits_for for lane in lanes if lane.waits_for), None)
        for watch in watch_secrets(plans, settings.pipes.parent):
            supervision.run(watch.run(stopping), "secret")
        removed: list[RemovedLane | RemovedPipe] = [
            RemovedLane(broker, producer, lane, choice) for lane, choice in plan.removed.items()
        ]
        removed += [
            RemovedPipe(broker, producer, pipe, choice, plan.removed) for pipe, choice in plan.removed_pipes.items()
        ]
        progress.find = lambda: (step for one in (*lanes, *removed) for step in one.steps())
        supervision.run(progress.run(stopping), "watch over the lanes")
        readiness.reason = None
        drain = settings.drain * _DRAIN_SHARE
        running = [supervision.run(lane.run(stopping, drain), f"lane {lane.name}") for lane in lanes]
        running += [supervision.run(lane.run(stopping, drain), f"removed {lane.name}") for lane in removed]
        await stopping.wait()
        readiness.reason = "stopping"
        if running:
            await asyncio.wait(running)
        if cut_short := [lane.name for lane in lanes if not lane.is_drained]:
            supervision.cut_short(f"open requests: {', '.join(cut_short)}")
