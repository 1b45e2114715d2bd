"""The table service as a whole: the order in which it opens its parts, and in which it stops. There is nothing to drain."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path

import structlog

from services.core.folders import make_folder
from services.core.pipe_file.pipes import PipeFile, load_pipes
from services.core.process.disk import show_disk
from services.core.process.expected import show_expected
from services.core.process.lifecycle import Supervision
from services.core.process.management import serve_management
from services.core.process.progress import ProgressWatch
from services.core.process.startup import Readiness, open_when_reachable, raise_file_limit
from services.core.security.key_watch import watch_keys
from services.core.security.service_rights import rights_of
from services.core.yaml_source import BadConfiguration, Problem
from services.table.access import Access
from services.table.api import Api
from services.table.follower import Follower
from services.table.http_server import HttpServer
from services.table.settings import TableSettings
from services.table.snapshots import SnapshotSource, remove_left_copies

OPENAPI = Path(__file__).with_name("openapi.json")

log = structlog.get_logger()


async def start(settings: TableSettings, supervision: Supervision) -> None:
    """Run until the stop. Ready when every table has the events that its stream had at the start. Raises BadConfiguration,
    OSError."""
    host, port = settings.address()
    readiness, progress, stopping = Readiness(), ProgressWatch(), supervision.stopping
    pipes = await asyncio.to_thread(load_pipes, settings.pipes)
    streams = find_tables(pipes)
    show_expected(pipes, ledger=settings.ledger, registry=settings.schemas)
    openapi = await asyncio.to_thread(OPENAPI.read_bytes)
    await asyncio.to_thread(_prepare, settings.data)
    show_disk(settings.data)
    access = Access()
    keys = watch_keys("table", settings.keys, access) if settings.keys is not None else None
    if keys is not None:
        await keys.load()
        supervision.run(keys.run(stopping), "keys")
    async with AsyncExitStack() as stack:
        management = await stack.enter_async_context(
            serve_management(settings.management, readiness.why_not, why_not_alive=progress.why_not_alive)
        )
        log.info("started", management=management)
        readiness.set_reason("the broker is not reachable yet")
        rights = rights_of("table", pipes)
        broker = await open_when_reachable(
            stack, settings.broker, stopping, rights=rights, on_wait=readiness.set_reason, pipes=pipes
        )
        if broker is None:
            return
        followers: dict[str, Follower] = {}
        running = []
        source = None
        if settings.snapshot_from is not None:
            source = SnapshotSource(settings.snapshot_from, settings.snapshot_key)
        for name, age_ms in streams.items():
            thread = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix=f"table-{name}"))
            followers[name] = follower = Follower(
                broker, name, age_ms, settings.data, thread, None if source is None else source.begin
            )
            stack.push_async_callback(follower.close)
            running.append(supervision.run(follower.run(stopping), name))
        progress.find = lambda: (follower.turns.step() for follower in followers.values())
        supervision.run(progress.run(stopping), "watch over the followers")
        behind_ms = round(settings.behind * 1000)
        api = Api(followers, access, openapi, wait=settings.wait, behind_ms=behind_ms, max_changes=settings.max_changes)
        server = HttpServer(api.handle, max_connections=raise_file_limit(settings.max_connections))
        try:
            address = await stack.enter_async_context(server.listen(host, port))
        except OSError as error:
            remedy = "Try: another --listen, or end the process that uses this address"
            raise OSError(f"{settings.listen}: {error.strerror}. {remedy}") from error
        log.info("listening", address=address)

        def why_not() -> str | None:
            found = [reason for one in followers.values() if (reason := one.why_not_ready(behind_ms)) is not None]
            return "; ".join(found) or None

        readiness.check, readiness.reason = why_not, None
        await stopping.wait()
        readiness.reason = "stopping"
        await asyncio.wait(running)


def find_tables(pipes: PipeFile) -> dict[str, int]:
    """The compacted streams, and how long (ms) each keeps its tombstones. Raises BadConfiguration when there is none."""
    found = {name: round(stream.retention * 1000) for name, stream in pipes.streams.items() if stream.compact}
    if not found:
        message = "no stream is compacted, so there is no table. Try: compact: true in a stream"
        raise BadConfiguration([Problem("table", "pipes", message)])
    return found


def _prepare(folder: Path) -> None:
    """Raises BadConfiguration."""
    try:
        make_folder(folder, mode=0o700)
        remove_left_copies(folder)
    except OSError as error:
        message = f"{folder}: {error.strerror}. Try: --data with a folder that this user may write"
        raise BadConfiguration([Problem("table", "data", message)]) from error
