"""The observer as a service: the ledger, a reader of dead letters, an API with a page, a management port."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog
from aiohttp import web

from services.core.audit import write_act
from services.core.broker.contract import Broker
from services.core.broker.producer import Producer
from services.core.control.pauses import Pauses
from services.core.http.address import is_loopback, parse_address
from services.core.http.page_files import load_files
from services.core.pipe_file.pipes import PipeFile, load_pipes
from services.core.pipe_file.topic_names import RETRIER_DEAD, dead_letter_topic, lane_name, renames_of
from services.core.pipe_file.webhook import Secret
from services.core.process.expected import show_expected
from services.core.process.lifecycle import Supervision
from services.core.process.management import serve_management
from services.core.process.progress import ProgressWatch, Turns, WatchedReader
from services.core.process.progress import Step as Work
from services.core.process.startup import Readiness, open_when_reachable
from services.core.security.bearer import Tokens, read_tokens, watch_tokens
from services.core.security.service_rights import rights_of
from services.core.security.signing import BadSecret, SigningKeys, watch_secret
from services.core.yaml_source import BadConfiguration, Problem
from services.observer.alarms import AlarmWebhook
from services.observer.backlogs import Backlogs
from services.observer.dead_letters import OPENAPI, Api, DeadLetterReader, FailureTable
from services.observer.event_api import EventApi
from services.observer.follower import Follower
from services.observer.health import Reason, list_pauses
from services.observer.http import serve_api
from services.observer.ledger.flow import Step, read_flow
from services.observer.ledger.table import Ages
from services.observer.ledger_api import LedgerApi
from services.observer.page import add_page
from services.observer.scaling_api import GroupReports, ScalingApi
from services.observer.settings import ObserverSettings
from services.observer.standby import SpeakerLock
from services.observer.view import CauseView, View, make_view
from services.observer.watch import Watch

log = structlog.get_logger()

_SHOWN_CAUSES = 5


async def start(settings: ObserverSettings, supervision: Supervision) -> None:
    """Run until the stop; there is nothing to drain. Ready when the API answers. Raises BadConfiguration, OSError."""
    pipes = await asyncio.to_thread(load_pipes, settings.pipes)
    show_expected(pipes, ledger=settings.ledger, registry=settings.schemas)
    openapi = await asyncio.to_thread(OPENAPI.read_bytes)
    page = await asyncio.to_thread(load_files, "services.observer.page")
    keys = await asyncio.to_thread(_read_keys, settings.alarm_secret)
    tokens = await asyncio.to_thread(_read_tokens, settings)
    readiness, progress, stopping = Readiness(), ProgressWatch(), supervision.stopping
    async with AsyncExitStack() as stack:
        management = await stack.enter_async_context(
            serve_management(settings.management, readiness.why_not, why_not_alive=progress.why_not_alive)
        )
        log.info("started", management=management)
        rights = rights_of("observer", pipes)
        broker = await open_when_reachable(
            stack,
            settings.broker,
            stopping,
            rights=rights,
            on_wait=readiness.set_reason,
            pipes=pipes,
        )
        if broker is None:
            return
        producer = await stack.enter_async_context(Producer(broker.appender))
        parts = _Parts(pipes, broker, producer, settings, keys)
        if settings.alarm_secret is not None:
            watch = watch_secret("alarms", Secret(file=settings.alarm_secret), Path(), keys)
            supervision.run(watch.run(stopping), "alarm secret")
        running = [supervision.run(work, name) for name, work in parts.work(stopping)]
        progress.find = parts.steps
        supervision.run(progress.run(stopping), "watch over the readers")
        api = Api(parts.failures, parts.reader, parts.state, openapi, parts.breaker)
        ledger = LedgerApi(
            parts.follower, broker.reader, parts.watch.find_health, settings.threshold, partial(write_act, producer)
        )
        scaling = ScalingApi(parts.group_reports)
        routes = [*api.routes(), *ledger.routes(), *scaling.routes(), *EventApi(broker, pipes).routes()]
        if tokens is not None and settings.token_file is not None:
            running.append(supervision.run(watch_tokens(settings.token_file, tokens).run(stopping), "tokens"))
        address = await stack.enter_async_context(
            _listen(settings, routes, lambda app: add_page(app, page, parts.view), tokens)
        )
        log.info("listening", address=address)
        readiness.reason = None
        await stopping.wait()
        readiness.reason = "stopping"
        await asyncio.wait(running)


class _Parts:
    """The components, and the figures that the API and the page show."""

    def __init__(
        self,
        pipes: PipeFile,
        broker: Broker,
        producer: Producer,
        settings: ObserverSettings,
        keys: SigningKeys,
    ) -> None:
        self.failures, self.group_reports = FailureTable(pipes), GroupReports()
        named = dict.fromkeys([*pipes.pipes, *(old.partition("/")[0] for old in renames_of(pipes))])
        letters = WatchedReader(broker.reader, Turns("reading dead letters"))
        self.reader = DeadLetterReader(letters, [*map(dead_letter_topic, named), RETRIER_DEAD], self.failures.count)
        pauses = WatchedReader(broker.reader, Turns("reading pauses"))
        self._pauses = Pauses(pauses, renames_of(pipes))
        self._backlogs = Backlogs(pipes, broker.admin)
        webhook = AlarmWebhook(settings.alarm_url, keys) if settings.alarm_url is not None else None
        self.watch = Watch(settings.threshold, webhook, self._more_reasons)
        ages = Ages(final=round(settings.final_after * 1000))
        self.follower = Follower(
            read_flow(pipes),
            broker.reader,
            producer,
            self.watch.on_final,
            ages=ages,
            by_partition=broker.features.contiguous_offsets,
        )
        self.watch.follower = self.follower
        self.lock = SpeakerLock(broker, self.follower.step_down)
        self.follower.share(self.lock)
        self._turns = (letters.turns, pauses.turns, self._backlogs.turns, self.lock.turns)

    def work(self, stopping: asyncio.Event) -> Iterator[tuple[str, Coroutine[Any, Any, None]]]:
        """The tasks that run until the stop, by name."""
        yield "dead letters", self.reader.run(stopping)
        yield "pauses", self._pauses.follow(stopping)
        yield "backlogs", self._backlogs.follow(stopping)
        yield "speaker", self.lock.run(stopping)
        yield "follower", self.follower.run(stopping)
        yield "watch", self.watch.run(stopping)

    def steps(self) -> Iterator[Work]:
        """For the `ProgressWatch`: the loops of `work`, without that of the watch, which waits for nothing."""
        yield from (turns.step() for turns in self._turns)
        yield from self.follower.steps()

    def state(self, pipe: str, destination: str) -> str | None:
        if self._pauses.unknown is not None:
            return None
        return "paused" if lane_name(pipe, destination) in self._pauses.paused() else "active"

    def breaker(self, pipe: str, destination: str) -> str | None:
        return self.follower.table.liveness.breaker(Step("expel", pipe, destination), self.follower.now_ms())

    def _more_reasons(self, pipe: str) -> list[Reason]:
        paused = {} if self._pauses.unknown is not None else self._pauses.paused()
        found = list_pauses(paused, pipe, self.follower.table.flow.pipes[pipe].destinations)
        return [*found, *self.follower.newer.as_reasons(pipe, self.follower.now_ms())]

    def view(self) -> View:
        now = self.follower.now_ms()
        threshold, find_health = self.watch.threshold, self.watch.find_health
        made = make_view(self.follower, now, threshold, find_health, self.state, self._causes_of, self._backlogs.of)
        return msgspec.structs.replace(made, scaling=self.group_reports.all(now))

    def _causes_of(self, pipe: str, destination: str) -> tuple[CauseView, ...]:
        found = self.failures.all()[pipe, destination].causes.most_common()[:_SHOWN_CAUSES]
        return tuple(
            CauseView(cause.detail or cause.reason, cause.count, cause.last, cause.example.event_id) for cause in found
        )


@asynccontextmanager
async def _listen(
    settings: ObserverSettings,
    routes: Sequence[web.RouteDef],
    more: Callable[[web.Application], None],
    tokens: Tokens | None,
) -> AsyncIterator[str]:
    names = frozenset(settings.names.split(",")) - {""}
    try:
        async with serve_api(settings.listen, routes, more, tokens=tokens, names=names) as bound:
            yield bound
    except OSError as error:
        raise OSError(
            f"{settings.listen}: {error.strerror}. Try: another --listen, or end the process that listens there"
        ) from error


def _read_tokens(settings: ObserverSettings) -> Tokens | None:
    """Blocking. Raises BadConfiguration, also when other machines can reach the API and it has no tokens."""
    if settings.token_file is not None:
        return Tokens(read_tokens(settings.token_file))
    if not is_loopback(parse_address(settings.listen)[0]):
        message = f"other machines can reach {settings.listen}, so clients need tokens. Try: --token-file"
        raise BadConfiguration([Problem("observer", "token_file", message)])
    return None


def _read_keys(file: Path | None) -> SigningKeys:
    """Blocking. Raises BadConfiguration."""
    if file is None:
        return SigningKeys()
    try:
        return SigningKeys.read(Secret(file=file), Path(), {})
    except BadSecret as error:
        raise BadConfiguration([Problem("--alarm-secret", "", str(error))]) from error
