"""Runs and stops a service, and sets up its logs.

A service's `start` opens its resources and runs its components in a `Supervision`. SIGTERM or SIGINT sets `stopping` and gives
the components the drain time; a second signal ends the process at once. Exit status: 0 drained, 1 failed, 2 bad configuration.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import orjson
import structlog
import uvloop

from services.core.metrics import BUILD
from services.core.process.settings import Settings, load_settings
from services.core.security.masking import mask_secrets
from services.core.version import VERSION
from services.core.yaml_source import BadConfiguration


def configure_logs(service: str, level: str) -> None:
    """Set up structlog for this process, also for records of the standard library. level: debug … error."""
    number = getattr(logging, level.upper())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            mask_secrets,
            structlog.processors.JSONRenderer(serializer=lambda data, **_: orjson.dumps(data, default=str).decode()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(handlers=[_Forward()], level=max(number, logging.WARNING), force=True)
    # It logs an error for each failed reconnect of each client; our own code logs that once.
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)


class _Forward(logging.Handler):
    """Records of libraries, as structured lines."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info or None
        )


log = structlog.get_logger()
Model = TypeVar("Model", bound=Settings)


CLOSE_S = 2.0
"""The time limit for closing files and connections after the drain time."""


class ComponentEndedError(RuntimeError):
    """A component that must run until the stop ended early."""


class Supervision:
    """The stop signal and the tasks of a running service. A component that ends before `stopping` is an error."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        self.stopping = asyncio.Event()
        self.left: list[str] = []

    def run(self, component: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a component in a task. It returns after `stopping` is set and it has drained."""
        return self._group.create_task(self._watch(component, name), name=name)

    def cut_short(self, what: str) -> None:
        """Record work (described for a person) that was not finished in the drain time. The exit status is then 1."""
        self.left.append(what)

    async def _watch(self, component: Coroutine[Any, Any, None], name: str) -> None:
        await component
        if not self.stopping.is_set():
            raise ComponentEndedError(f"{name} ended by itself")


async def wait_for_stop(stopping: asyncio.Event, limit: float) -> None:
    """Wait until `stopping` is set, at most `limit` seconds."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit):
            await stopping.wait()


async def run_until(stopping: asyncio.Event, *work: Coroutine[Any, Any, None]) -> None:
    """Run these until `stopping`, then cancel them. An error of one ends the others, and is raised in a group."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        await stopping.wait()
        for task in tasks:
            task.cancel()


async def supervise(start: Callable[[Supervision], Awaitable[None]], drain: float) -> int:
    """Run `start` until it returns, at most `drain` seconds after a signal. Returns the exit status.

    Raises only BadConfiguration.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(None) as limit, asyncio.TaskGroup() as group:
            supervision = Supervision(group)

            def stop(name: str) -> None:
                allowed = 0.0 if supervision.stopping.is_set() else drain
                log.info("stopping", signal=name, drain_seconds=allowed)
                supervision.stopping.set()
                if not limit.expired():
                    limit.reschedule(loop.time() + allowed)
                loop.call_later(allowed + CLOSE_S, _exit_now)

            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop, number.name)
            await start(supervision)
    except TimeoutError:
        log.warning("not_drained_in_time", hint="events in flight were not committed and are processed again")
        return 1
    except BaseExceptionGroup as errors:
        if (bad := _find_bad_configuration(errors)) is not None:
            raise bad from None
        for error in errors.exceptions:
            log.exception("failed", error=str(error), kind=type(error).__name__, exc_info=error)
        return 1
    if supervision.left:
        log.warning(
            "not_drained",
            left=supervision.left,
            hint="this work was not committed and is repeated. Try: a longer --drain",
        )
        return 1
    log.info("drained")
    return 0


def _exit_now() -> None:
    """For a close that hangs. Acknowledged events are durable; events that were not committed are processed again."""
    log.error("not_closed_in_time", seconds=CLOSE_S)
    os._exit(1)


def _find_bad_configuration(errors: BaseExceptionGroup[BaseException]) -> BadConfiguration | None:
    for error in errors.exceptions:
        found = _find_bad_configuration(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, BadConfiguration):
            return found
    return None


def run_service(
    model: type[Model],
    start: Callable[[Model, Supervision], Awaitable[None]],
    argv: Sequence[str],
    environ: dict[str, str],
) -> int:
    """Parse settings, set up logs, run `start` on uvloop. Returns the exit status for sys.exit. Blocking."""
    try:
        settings = load_settings(model, argv, environ)
    except BadConfiguration as error:
        return report_bad_configuration(error)
    configure_logs(model.section, settings.log_level)
    BUILD.labels(model.section, VERSION).set(1)

    async def begin(supervision: Supervision) -> None:
        await start(settings, supervision)

    try:
        return uvloop.run(supervise(begin, settings.drain))
    except BadConfiguration as error:
        return report_bad_configuration(error)


def report_bad_configuration(error: BadConfiguration) -> int:
    """Print all problems on stderr. Returns the exit status 2."""
    for problem in error.problems:
        print(f"error: {problem}", file=sys.stderr)
    return 2
