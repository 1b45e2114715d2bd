"""The autoscaler as a service: one scaler of streams, one of groups, and a management port."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import structlog

from services.autoscaler.groups.drivers.contract import GroupDriver
from services.autoscaler.groups.drivers.management_port import open_executors
from services.autoscaler.groups.drivers.open import JoinedDrivers, open_driver
from services.autoscaler.groups.observer_client import ObserverUnavailable, open_observer
from services.autoscaler.groups.scaler import GroupScaler
from services.autoscaler.groups.topics import Topics
from services.autoscaler.partitions import PartitionScaler
from services.autoscaler.settings import EXECUTORS, AutoscalerSettings
from services.autoscaler.shards.scaler import ShardScaler
from services.core.broker.contract import Broker
from services.core.pipe_file.pipes import load_pipes
from services.core.pipe_file.topic_names import event_topics
from services.core.process.lifecycle import Supervision
from services.core.process.management import serve_management
from services.core.process.startup import Readiness, open_when_reachable
from services.core.security.service_rights import rights_of
from services.core.yaml_source import BadConfiguration, Problem

log = structlog.get_logger()


async def start(settings: AutoscalerSettings, supervision: Supervision) -> None:
    """Run until the stop. Raises BadConfiguration; other errors are retried, or end the process."""
    check_groups(settings)
    readiness, stopping, topics = Readiness(), supervision.stopping, Topics()
    async with AsyncExitStack() as stack:
        management = await stack.enter_async_context(serve_management(settings.management, readiness.why_not))
        log.info("started", management=management)
        running = []
        if settings.groups:
            running.append(supervision.run(_scale_groups(settings, topics, stopping), "groups"))
        rights, pipes = [], None
        if settings.broker.startswith("kafka:"):
            pipes = await asyncio.to_thread(load_pipes, settings.pipes)
            rights = rights_of("autoscaler", pipes)
        broker = await open_when_reachable(
            stack, settings.broker, stopping, rights=rights, on_wait=readiness.set_reason, pipes=pipes
        )
        if broker is not None:
            readiness.reason = None
            topics.attach(broker)
            scaler = await _stream_scaler(settings, broker)
            if isinstance(scaler, ShardScaler):
                readiness.check = _ask(scaler)
            if scaler is not None:
                running.append(supervision.run(scaler.run(stopping), "streams"))
        await stopping.wait()
        readiness.reason = "stopping"
        if running:
            await asyncio.wait(running)


def _ask(scaler: ShardScaler) -> Callable[[], str | None]:
    return lambda: scaler.waits_for


def check_groups(settings: AutoscalerSettings) -> None:
    """Raises BadConfiguration when nobody can resize one of the groups."""
    problems, others = [], settings.groups.keys() - {EXECUTORS}
    if others and settings.group_driver is None:
        message = "there are groups and no platform. Try: fleet:///data, aws://region or kubernetes://namespace"
        problems.append(Problem("autoscaler", "group_driver", message))
    if EXECUTORS in settings.groups and settings.transform is None:
        message = f"the group {EXECUTORS} needs the address of its transform service. Try: transform:9100"
        problems.append(Problem("autoscaler", "transform", message))
    if settings.transform is not None and settings.transform_token_file is None:
        message = "the transform changes its executors only for a client with its token. Try: the file of its control_token_file"
        problems.append(Problem("autoscaler", "transform_token_file", message))
    if problems:
        raise BadConfiguration(problems)


async def _stream_scaler(settings: AutoscalerSettings, broker: Broker) -> ShardScaler | PartitionScaler | None:
    """The scaler for Kinesis or Kafka. None for the embedded log: its partitions have no limit. Raises BadConfiguration."""
    if settings.broker.startswith("log:"):
        return None
    pipes = await asyncio.to_thread(load_pipes, settings.pipes)
    if broker.resharding is not None:
        return ShardScaler(
            event_topics(pipes),
            broker.resharding,
            settings.targets,
            dry_run=settings.dry_run,
            every=settings.stream_every,
            announce=partial(_announce, settings.observer, settings.observer_token_file),
        )
    return PartitionScaler(pipes, broker, settings.targets, settings.partition_capacity, dry_run=settings.dry_run)


async def _announce(address: str, token_file: Path | None, what: str, seconds: float) -> None:
    """Never fails: a full stream cannot wait until the observer is back."""
    try:
        async with open_observer(address, token_file) as observer:
            await observer.announce_shards(what, seconds)
    except ObserverUnavailable as error:
        log.warning("not_announced", what=what, error=str(error))


async def _scale_groups(settings: AutoscalerSettings, topics: Topics, stopping: asyncio.Event) -> None:
    """Needs the broker once, for the freezes. Afterwards groups are scaled while it is away."""
    token_file = settings.observer_token_file
    async with AsyncExitStack() as stack:
        by_group, others = dict[str, GroupDriver](), None
        if settings.transform is not None and settings.transform_token_file is not None:
            opening = open_executors(settings.transform, settings.transform_token_file)
            by_group[EXECUTORS] = await stack.enter_async_context(opening)
        if settings.group_driver is not None:
            others = await stack.enter_async_context(open_driver(settings.group_driver))
        observer = await stack.enter_async_context(open_observer(settings.observer, token_file))
        driver = JoinedDrivers(by_group, others)
        scaler = GroupScaler(settings.groups, driver, observer, topics, settings.dry_run)
        await scaler.run(stopping, settings.group_every)
