"""`penstock up`: runs the fleet on one machine until a signal stops it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.snapshot import Contents, copy_in, write_snapshot
from services.core.process.disk import show_disk
from services.core.process.expected import show_expected
from services.fleet.console import print_note
from services.fleet.folder import SNAPSHOT, describe_loss, keep_observer_token, lock_folder, take_restored
from services.fleet.pipes.check import check_pipe_file, find_warnings, read_checked
from services.fleet.pipes.topics import check_changes, describe_removed, prepare
from services.fleet.problem import CommandFailed
from services.fleet.stop import Stop, stop_on_signals
from services.fleet.up.kafka import run_kafka
from services.fleet.up.plan import broker_url, has_registry, make_plan
from services.fleet.up.ports import check_port_free
from services.fleet.up.settings import UpSettings, keys_of_ingest, master_of_transforms
from services.fleet.up.supervisor import Fleet, run_fleet

_STYLES = {"warning": "yellow", "error": "red", "critical": "red"}


def _notify(level: str, text: str) -> None:
    print_note(text, _STYLES.get(level, ""))


def _progress(text: str) -> None:
    print_note(text, "dim")


@asynccontextmanager
async def fleet_of(settings: UpSettings, config: str | None, stop: Stop) -> AsyncIterator[Fleet]:
    """Check everything, lock the data folder, start broker and services. Drains and stops them when the context is left.

    Prints the progress on stderr. Raises BadConfiguration, CommandFailed.
    """
    master = await asyncio.to_thread(master_of_transforms, None if config is None else Path(config))
    networks = settings.allow_networks
    check = partial(check_pipe_file, settings.pipes, listen=settings.listen, allow_networks=networks, master=master)
    pipes, contents = await asyncio.to_thread(read_checked, settings.pipes, config, check)
    for problem in await asyncio.to_thread(find_warnings, settings.pipes):
        _notify("warning", f"warning: {problem}")
    data = await asyncio.to_thread(settings.data.absolute)
    async with AsyncExitStack() as stack:
        hold = lock_folder(data)
        await asyncio.to_thread(hold.__enter__)
        stack.push_async_exit(lambda *raised: asyncio.to_thread(hold.__exit__, *raised))
        await asyncio.to_thread(_check_ports, settings, pipes)
        kafka = None
        if settings.broker == "kafka":
            _progress("starting Kafka")
            kafka = await stack.enter_async_context(run_kafka(data / "kafka", _notify, stop))
        broker = broker_url(settings, kafka)
        changes = await check_changes(broker, pipes, settings.pipes, data)
        topics, waiting, grown = await prepare(broker, pipes, settings.pipes)
        _progress(f"topics: {len(topics.created)} created, {len(topics.kept)} there already")
        for one in grown:
            _progress(str(one))
        for line in [*map(str, changes), *describe_removed(waiting, pipes, changes)]:
            _notify("warning", line)
        snapshot = data / SNAPSHOT
        await asyncio.to_thread(_keep, snapshot, contents, broker)
        keys = await asyncio.to_thread(keys_of_ingest, None if config is None else copy_in(snapshot, Path(config)))
        show_expected(pipes, ledger=settings.ledger, registry=has_registry(settings))
        show_disk(data)
        plan = make_plan(settings, pipes, broker, config, snapshot, has_retrier=topics.has_retrier, keys=keys)
        stop.check()
        yield await stack.enter_async_context(run_fleet(plan, settings.management, _notify, _progress, stop))


def _check_ports(settings: UpSettings, pipes: PipeFile) -> None:
    check_port_free(settings.listen, "ingest", "--listen")
    check_port_free(settings.management, "the supervisor", "--management")
    check_port_free(settings.observer, "the observer", "--observer")
    if any(stream.compact for stream in pipes.streams.values()):
        check_port_free(settings.tables, "the table service", "--tables")
    if settings.registry is not None:
        check_port_free(settings.registry, "the registry", "--registry")


def _keep(folder: Path, contents: Contents, broker: str) -> None:
    try:
        write_snapshot(folder, contents, broker)
        keep_observer_token(folder.parent)
    except OSError as error:
        raise CommandFailed(
            f"{folder} cannot be written: {error.strerror}", "freeing space there, or --data with another folder"
        ) from error


async def run_up(settings: UpSettings, config: str | None) -> int:
    """Run the command. Returns the exit status: 0 drained, 1 not all drained in time."""

    def on_signal(at_once: bool) -> None:
        print_note("stopping at once" if at_once else "draining; press Ctrl-C again to stop at once", "bold")

    with stop_on_signals(on_signal) as stop:
        async with fleet_of(settings, config, stop) as fleet:
            _print_running(fleet)
            await asyncio.to_thread(_print_restored, settings.data.absolute())
            await stop.asked.wait()
        print_note("stopped")
    return 0 if fleet.drained else 1


def _print_restored(data: Path) -> None:
    restored = take_restored(data)
    if restored is not None:
        for line in describe_loss(restored.cut):
            _notify("warning", line)


def _print_running(fleet: Fleet) -> None:
    plan = fleet.plan
    print_note(f"Penstock runs. Send events to http://{plan.listen}/v1/streams/STREAM/events", "bold green")
    print_note(f"  broker  {plan.broker}")
    if plan.tables is not None:
        print_note(f"  tables  http://{plan.tables}/v1/tables/STREAM/KEY")
    print_note(f"  lag and loss, live: http://{plan.observer}/")
    print_note(f"  destinations, with all dead letters so far: http://{plan.observer}/v1/destinations")
    if plan.registry:
        print_note(f"  schemas: http://{plan.registry}/")
    for process in fleet.processes:
        print_note(f"  {process.spec.name:<12} pid {process.pid}  http://{process.management}/metrics  {process.log}")
    print_note("  Ctrl-C drains and stops. Try: penstock status")
