"""The start of a service: its readiness, the broker, the limit on open files, the garbage collector."""

import asyncio
import gc
import resource
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack

import structlog

from services.core.backoff import Backoff
from services.core.broker.connect import BadBrokerUrl
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError, DataDamaged
from services.core.broker.rights import Right, require_rights
from services.core.fleet_broker import open_fleet_broker, open_own_broker
from services.core.pipe_file.pipes import PipeFile
from services.core.provision import require_safe_topics
from services.core.yaml_source import BadConfiguration, Problem

log = structlog.get_logger()

_BASE_WAIT, _MAX_WAIT = 0.2, 5.0
_GC_YOUNG_OBJECTS = 50_000
_OTHER_FILES = 200
"""Open files for logs, the broker and its files."""


class Readiness:
    """Whether a service is ready, for its management port. reason: why it is not, for a person, or None.

    check: called when reason is None; returns the same.
    """

    def __init__(self) -> None:
        self.reason: str | None = "starting"
        self.check: Callable[[], str | None] = lambda: None

    def set_reason(self, reason: str) -> None:
        """Make it not ready, for this reason."""
        self.reason = reason

    def why_not(self) -> str | None:
        """The reason; None when it is ready."""
        return self.reason or self.check()


async def open_when_reachable(
    stack: AsyncExitStack,
    url: str,
    stopping: asyncio.Event,
    *,
    topics: Collection[str] = (),
    rights: Sequence[Right] = (),
    on_wait: Callable[[str], None] = lambda _reason: None,
    pipes: PipeFile | None = None,
    own_only: bool = False,
) -> Broker | None:
    """The broker, as soon as it is reachable; `stack` closes it. None when `stopping` is set first.

    topics: for `require_safe_topics`. rights: it waits until our user has them. on_wait: called with the reason for waiting.
    pipes: of a service that reads or writes streams; own_only: those on the fleet's own broker. Raises BadConfiguration and
    DataDamaged: waiting does not help.
    """
    retry = Backoff(_BASE_WAIT, _MAX_WAIT)
    told: type[BrokerError] | None = None
    while not stopping.is_set():
        try:
            async with AsyncExitStack() as attempt:
                opening = open_own_broker(url, pipes) if own_only and pipes else open_fleet_broker(url, pipes)
                broker = await attempt.enter_async_context(opening)
                await require_rights(broker, rights)
                await require_safe_topics(broker.admin, topics)
                stack.push_async_exit(attempt.pop_all())
                return broker
        except BadBrokerUrl as error:
            raise BadConfiguration([Problem("--broker", "", str(error))]) from error
        except DataDamaged:
            raise
        except BrokerError as error:
            if not error.retriable:
                raise BadConfiguration([Problem("--broker", "", str(error))]) from error
            on_wait(f"the broker cannot be opened: {error}")
            if retry.fail() or type(error) is not told:  # a cluster that has just started may lack a right of ours, too
                told = type(error)
                log.warning("broker_unavailable", error=str(error), hint="the broker is tried again")
            await retry.wait(stopping)
    return None


def raise_file_limit(connections: int) -> int:
    """Raise the limit on open files for so many connections, if the system allows it. Returns how many are possible."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return connections
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft >= wanted:
        return connections
    log.warning("few_files", limit=soft, wanted=wanted, hint="Try: ulimit -n, fewer connections, or more instances")
    return max(1, soft - _OTHER_FILES)


def tune_garbage_collector() -> None:
    """Make collections rare: a service creates many objects and no cycles."""
    gc.freeze()
    gc.set_threshold(_GC_YOUNG_OBJECTS, 20, 50)
