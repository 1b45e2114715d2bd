"""Ingest as a whole: the order in which it opens its parts, and in which it drains them.

Drain: readiness off, stop accepting, answer the open requests, report to the ledger, close the producer, close the broker.
`lifecycle` bounds it.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from services.core.broker.producer import Producer
from services.core.control.key_marks import KeyMarker
from services.core.ledger.reporter import Reporter, close_reporters, keep_reporting, new_instance
from services.core.pipe_file.pipes import load_pipes, own_streams
from services.core.process.expected import show_expected
from services.core.process.lifecycle import Supervision
from services.core.process.management import serve_management
from services.core.process.startup import Readiness, open_when_reachable, raise_file_limit
from services.core.security.key_watch import watch_keys
from services.core.security.service_rights import rights_of
from services.ingest.access import Access
from services.ingest.endpoint import Endpoint
from services.ingest.http_server import HttpServer, Timeouts
from services.ingest.intake import Intake
from services.ingest.metrics import NODE, StreamLedger
from services.ingest.probe import Probe, flush_tallies
from services.ingest.settings import IngestSettings

OPENAPI = Path(__file__).with_name("openapi.json")

log = structlog.get_logger()

_UNPACK_THREADS = 2


async def start(settings: IngestSettings, supervision: Supervision) -> None:
    """Run until `supervision.stopping` is set and everything is drained. Raises BadConfiguration, OSError."""
    host, port = settings.address()
    readiness, stopping = Readiness(), supervision.stopping
    pipes = await asyncio.to_thread(load_pipes, settings.pipes)
    show_expected(pipes, ledger=settings.ledger, registry=settings.schemas)
    access = Access(None, quota_bytes=settings.quota_bytes)
    keys = watch_keys("ingest", settings.keys, access) if settings.keys is not None else None
    if keys is not None:
        await keys.load()
    openapi = await asyncio.to_thread(OPENAPI.read_bytes)
    async with AsyncExitStack() as stack:
        management = await stack.enter_async_context(serve_management(settings.management, readiness.why_not))
        log.info("started", management=management)
        readiness.set_reason("the broker is not reachable yet")
        rights = rights_of("ingest", pipes)
        broker = await open_when_reachable(
            stack, settings.broker, stopping, rights=rights, on_wait=readiness.set_reason, pipes=pipes
        )
        if broker is None:
            return
        producer = await stack.enter_async_context(Producer(broker.appender, max_pending_bytes=settings.max_in_flight))
        intakes = {name: Intake(name, stream, producer.rotate_keyless) for name, stream in own_streams(pipes).items()}
        ledgers = []
        if settings.ledger:
            instance = new_instance()
            ledgers = [_open_ledger(intake, producer, instance) for intake in intakes.values()]
        marker = KeyMarker(producer, broker.reader, NODE)
        await marker.load()
        probe = Probe(broker, producer, intakes.values())
        unpackers = stack.enter_context(ThreadPoolExecutor(_UNPACK_THREADS, thread_name_prefix="unpack"))
        others = pipes.streams.keys() - intakes.keys()
        endpoint = Endpoint(intakes, producer, marker, access, settings.limits, openapi, unpackers, others)
        server = HttpServer(
            endpoint.handle,
            timeouts=Timeouts(settings.head_timeout, settings.body_timeout, settings.idle_timeout),
            max_connections=raise_file_limit(settings.max_connections),
            max_in_flight=settings.max_in_flight,
        )
        supervision.run(probe.run(stopping), "probe")
        supervision.run(flush_tallies(intakes.values(), producer, stopping), "tallies")
        supervision.run(keep_reporting(ledgers, stopping), "ledger")
        if broker.resharding is None:  # otherwise nobody adds partitions, and each read takes from the shard's limit
            supervision.run(marker.run(stopping), "key marks")
        if keys is not None:
            supervision.run(keys.run(stopping), "keys")
        async with AsyncExitStack() as listening:
            try:
                accepting = server.listen(host, port, reuse_port=settings.reuse_port)
                host, port = await listening.enter_async_context(accepting)
            except OSError as error:
                remedy = "Try: another --listen, or end the process that uses this address"
                raise OSError(f"{settings.listen}: {error.strerror}. {remedy}") from error
            log.info("listening", address=f"{host}:{port}")
            readiness.check, readiness.reason = lambda: probe.reason, None
            await stopping.wait()
            readiness.reason = "stopping"
        await close_reporters(ledgers)


def _open_ledger(intake: Intake, producer: Producer, instance: str) -> StreamLedger:
    """Ingest has no backlog: it stores or refuses each event within seconds."""
    lags = intake.tally.lags
    intake.ledger = StreamLedger(Reporter(producer, instance, NODE, intake.name, lags=lags, has_backlog=False))
    return intake.ledger
