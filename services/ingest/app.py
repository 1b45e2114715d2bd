"""Ingest as a whole: the order in which it opens its parts, and in which it drains them.

Drain: readiness off, stop accepting, answer what is under way, report to the ledger, close the producer, close the broker.
`lifecycle` bounds it.
"""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import structlog

from services.core import metrics
from services.core.broker.connect import BadBrokerUrl, open_broker
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError
from services.core.broker.producer import Producer
from services.core.ledger.reporter import Reporter, keep_reporting, new_instance, say_goodbye
from services.core.lifecycle import Supervision, wait_for_stop
from services.core.management import serve_management
from services.core.pipes import load_pipes
from services.core.startup import raise_file_limit
from services.core.yaml_source import BadConfiguration, Problem
from services.ingest.access import Access
from services.ingest.endpoint import Endpoint
from services.ingest.http_server import HttpServer, Timeouts
from services.ingest.intake import NODE, Intake, max_age_ms
from services.ingest.key_watch import watch_keys
from services.ingest.probe import Probe, flush_tallies
from services.ingest.settings import IngestSettings
from services.ingest.stream_ledger import StreamLedger

FILE = Path(__file__).with_name("openapi.json")


def load_openapi() -> bytes:
    """The document as it is served. Blocking: reads a file of some 20 KB."""
    return FILE.read_bytes()


log = structlog.get_logger()

UNPACK_THREADS = 2
OPEN_AGAIN_S = 1.0


async def start(settings: IngestSettings, supervision: Supervision) -> None:
    """Run until `supervision.stopping` is set and everything is drained. Raises BadConfiguration, OSError."""
    settings.address()
    stopping = supervision.stopping
    pipes = await asyncio.to_thread(load_pipes, settings.pipes)
    access = Access(None, quota_bytes=settings.quota_bytes)
    keys = watch_keys(settings.keys, access) if settings.keys is not None else None
    if keys is not None:
        await keys.load()
    openapi = await asyncio.to_thread(load_openapi)
    probe: Probe | None = None

    def readiness() -> str | None:
        if stopping.is_set():
            return "stopping"
        return probe.reason if probe is not None else "the broker is not reachable yet"

    async with AsyncExitStack() as stack:
        management = await stack.enter_async_context(serve_management(settings.management, readiness))
        log.info("management", address=management)
        broker = await _open_broker(stack, settings.broker, stopping)
        if broker is None:
            return
        producer = await stack.enter_async_context(Producer(broker.appender, max_pending_bytes=settings.max_in_flight))
        by_event_time = broker.features.retention_by_event_time
        intakes = {
            name: Intake(
                name, stream, producer.rotate_keyless, max_age_ms=max_age_ms(stream) if by_event_time else None
            )
            for name, stream in pipes.streams.items()
        }
        ledgers = []
        if settings.ledger:
            instance = new_instance()
            ledgers = [_open_ledger(intake, producer, instance) for intake in intakes.values()]
        probe = Probe(broker, producer, intakes.values())
        unpackers = stack.enter_context(ThreadPoolExecutor(UNPACK_THREADS, thread_name_prefix="unpack"))
        endpoint = Endpoint(intakes, producer, access, settings.limits, openapi, unpackers)
        server = HttpServer(
            endpoint.handle,
            timeouts=Timeouts(settings.head_timeout, settings.body_timeout, settings.idle_timeout),
            max_connections=raise_file_limit(settings.max_connections),
            max_in_flight=settings.max_in_flight,
        )
        supervision.run(probe.run(stopping), "probe")
        supervision.run(flush_tallies(intakes.values(), producer, stopping), "tallies")
        supervision.run(keep_reporting(ledgers, stopping), "ledger")
        if keys is not None:
            supervision.run(keys.run(stopping), "keys")
        async with _listen(server, settings) as address:
            log.info("listening", address=address)
            await stopping.wait()
        await say_goodbye(ledgers)


def _open_ledger(intake: Intake, producer: Producer, instance: str) -> StreamLedger:
    """Ingest has no backlog: it stores or refuses each event within seconds."""
    name = intake.name
    lags = {
        "lag_in": metrics.LAG_IN.labels(name, NODE),
        "lag_out": metrics.LAG_OUT.labels(name, NODE),
        "ingest_time": metrics.INGEST_TIME.labels(name),
    }
    reporter = Reporter(producer, instance, NODE, name, lags=lags, has_backlog=False)
    intake.ledger = StreamLedger(reporter)
    return intake.ledger


async def _open_broker(stack: AsyncExitStack, url: str, stopping: asyncio.Event) -> Broker | None:
    """The open broker, as soon as it can be had; None when the stop came first. Raises BadConfiguration."""
    while not stopping.is_set():
        try:
            return await stack.enter_async_context(open_broker(url))
        except BadBrokerUrl as error:
            raise BadConfiguration([Problem("fleet", "broker", str(error))]) from None
        except BrokerError as error:
            log.warning("the broker cannot be opened", kind=type(error).__name__, error=str(error))
        await wait_for_stop(stopping, OPEN_AGAIN_S)
    return None


@asynccontextmanager
async def _listen(server: HttpServer, settings: IngestSettings) -> AsyncIterator[str]:
    host, port = settings.address()
    async with AsyncExitStack() as stack:
        try:
            bound = await stack.enter_async_context(server.listen(host, port, reuse_port=settings.reuse_port))
        except OSError as error:
            remedy = "Try: another --listen, or end what listens there"
            raise CannotListen(f"{settings.listen}: {error.strerror}. {remedy}") from error
        yield f"{bound[0]}:{bound[1]}"


class CannotListen(OSError):
    """The port is in use, or the address does not belong to this machine."""
