"""The global retrier as a service: one retrier and a management port."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from services.core.broker.producer import Producer
from services.core.group_lag import follow_group
from services.core.ledger.report import TELEMETRY
from services.core.pipe_file.pipes import PipeFile, load_pipes
from services.core.pipe_file.topic_names import RETRIER_DEAD, RETRIER_GROUP
from services.core.process.expected import show_expected
from services.core.process.lifecycle import Supervision
from services.core.process.management import serve_management
from services.core.process.progress import ProgressWatch
from services.core.process.startup import Readiness, open_when_reachable
from services.core.security.service_rights import rights_of
from services.core.yaml_source import BadConfiguration
from services.global_retrier.delay_queue import DELAY_BY_TOPIC, SteadyClock
from services.global_retrier.metrics import RetrierLedger
from services.global_retrier.retrier import make_retrier
from services.global_retrier.settings import RetrierSettings

log = structlog.get_logger()

_DRAIN_SHARE = 0.6
"""Share of the drain time for open moves. The rest is for leaving the group and closing."""


async def start(settings: RetrierSettings, supervision: Supervision) -> None:
    """Run until the stop, then drain. Raises BadConfiguration."""
    readiness, progress, stopping = Readiness(), ProgressWatch(), supervision.stopping
    pipes = await asyncio.to_thread(_read_pipes, settings.pipes)
    if pipes is not None:
        show_expected(pipes, ledger=settings.ledger, registry=settings.schemas)
    async with AsyncExitStack() as stack:
        management = await stack.enter_async_context(
            serve_management(settings.management, readiness.why_not, why_not_alive=progress.why_not_alive)
        )
        log.info("started", management=management)
        broker = await open_when_reachable(
            stack,
            settings.broker,
            stopping,
            topics=[*DELAY_BY_TOPIC, RETRIER_DEAD, TELEMETRY],
            rights=() if pipes is None else rights_of("retrier", pipes),
            on_wait=readiness.set_reason,
            pipes=pipes,
        )
        if broker is None:
            return
        producer = await stack.enter_async_context(Producer(broker.appender))
        group = follow_group(broker, RETRIER_GROUP, list(DELAY_BY_TOPIC))
        ledger = RetrierLedger(producer if settings.ledger else None, group)
        retrier = make_retrier(broker, producer, SteadyClock(), ledger, pipes)
        readiness.check, readiness.reason = lambda: retrier.waits_for, None
        progress.find = retrier.steps
        supervision.run(progress.run(stopping), "watch over the retrier")
        running = supervision.run(retrier.run(stopping, settings.drain * _DRAIN_SHARE), "retrier")
        await stopping.wait()
        readiness.reason = "stopping"
        await asyncio.wait([running])
        await ledger.close()


def _read_pipes(path: Path) -> PipeFile | None:
    """None when it cannot be read; waiting events are moved even then. Blocking."""
    try:
        return load_pipes(path)
    except BadConfiguration as error:
        log.warning("pipes_unknown", error=str(error), hint="events that no lane will deliver are not counted")
        return None
