"""The transform service: one Spark session, one job per pipe, one management port."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import structlog
from aiohttp.web import RouteDef
from pyspark.sql import SparkSession

from services.core.broker.producer import Producer
from services.core.control.pauses import NOT_READ, Pauses
from services.core.group_control import GroupControl, SizeRefused
from services.core.pipe_file.pipes import load_pipes as load_pipe_file
from services.core.process.disk import show_disk
from services.core.process.expected import show_expected
from services.core.process.lifecycle import Supervision, wait_for_stop
from services.core.process.management import serve_management
from services.core.process.startup import open_when_reachable
from services.core.security.bearer import Tokens, read_tokens
from services.core.security.service_rights import rights_of
from spark.brokers.contract import SparkBroker, open_spark_broker
from spark.cluster.executor_group import ExecutorGroup
from spark.cluster.executors import ExecutorsGoneError, ExecutorState, ExecutorWatch
from spark.cluster.master import AUTO, AUTO_SLOTS, MasterKind
from spark.errors import shorten
from spark.figures import TaskFigures
from spark.health import STARTING, PipesHealth, Watchdog
from spark.java import JAVA_ERRORS, has_stopped, java_process, live_executors, why_ended
from spark.jobs.attempts import SETTLE_S, SuspectLock
from spark.jobs.job import Job
from spark.jobs.modes import choose_modes
from spark.jobs.start_checks import check_suitability
from spark.marks import BrokerMarks, Marks
from spark.scratch import Scratch
from spark.session import Cluster, open_session
from spark.settings import SelectedPipes, TransformSettings, check_master, check_tables, load_pipes, size_master
from spark.tables import ReferenceTable, TableRefresher
from spark.transforms.preparation import Prepared, prepare_pipes

T = TypeVar("T")
log = structlog.get_logger()

WATCH_EVERY_S = 0.5
FIGURES_EVERY_S = 5.0
APPLY_EVERY_S = 0.1
"""Seconds between two looks at the pauses that are known. `Pauses.follow` reads new ones."""


class Java(Protocol):
    """The process that runs Spark; as `subprocess.Popen`."""

    def poll(self) -> int | None: ...

    def kill(self) -> None: ...


class JavaEndedError(RuntimeError):
    """Spark's Java is gone, and nothing works without it."""


class BatchStuckError(RuntimeError):
    """A batch has exceeded its time limit."""


class QueriesBrokenError(RuntimeError):
    """Restarts do not help any pipe's query, or one of them in this Java. The log has the reasons."""


async def start(settings: TransformSettings, supervision: Supervision) -> None:
    """Run the selected pipes until the stop. Raises BadConfiguration for every mistake that shows before an event is read."""
    check_master(settings)
    selected = await run_blocking(lambda: load_pipes(settings), "pipes")
    check_tables(settings, selected)
    health = PipesHealth(selected.names)
    show_expected(selected.file, ledger=settings.ledger, registry=settings.schemas)
    group, routes = await run_blocking(lambda: _control_of_executors(settings), "token")
    management = serve_management(
        settings.management, health.ready, routes, note=health.note, why_not_alive=health.stuck
    )
    async with management as address:
        log.info("management_port_open", address=address)
        if not selected.names:
            log.warning("no_pipe_has_a_transform", pipes=str(settings.pipes))
            await supervision.stopping.wait()
            return
        broker = open_spark_broker(settings.broker, selected.file)
        scratch = await run_blocking(lambda: Scratch(settings.data), "scratch")
        show_disk(scratch.folder.parent)
        if "://" not in (checkpoints := settings.checkpoint_root()):
            show_disk(Path(checkpoints))
        loop = asyncio.get_running_loop()
        on_phase = partial(_call_soon, loop, health.record_phase)
        opening = run_blocking(lambda: _open(settings, broker, selected, scratch.folder, on_phase), "spark")
        opened = await _unless_stopped(opening, supervision)
        if opened is None:
            return
        session, prepared = opened
        jobs: list[Job] = []
        executors = None
        if cluster_of(settings) is not None:
            executors = ExecutorWatch(settings.master)
            health.why_waiting = executors.problem
            supervision.run(watch_executors(executors, session, health, jobs, supervision), "watch over executors")
            if group is not None:
                group.on_leave = executors.expect_end
                group.open(session)
        suspects = SuspectLock(0.0 if len(prepared) == 1 else SETTLE_S)
        supervision.run(follow_tasks(session, supervision), "figures of tasks")
        watching = supervision.run(watch_java(java_process(session), health, supervision), "watch over Java")
        async with AsyncExitStack() as stack:
            control = await _open_control(stack, settings, supervision, health)
            if control is not None:
                pauses, marks = control
                clock = time.monotonic if executors is None else executors.clock
                shown = Shown(executors.count if executors else lambda: 0, str(session.sparkContext.uiWebUrl or ""))
                jobs += [_make_job(settings, broker, marks, health, suspects, clock, shown, each) for each in prepared]
                _set_pauses(pauses, jobs)
                tables = {table.name: table for each in prepared for table in each.tables.values()}
                refresher = TableRefresher(session, tables.values(), _in_use(prepared, jobs))
                refresher.start()
                stack.callback(refresher.stop)
                supervision.run(_follow_pauses(pauses, jobs, supervision.stopping), "pauses of jobs")
                if group is not None:
                    supervision.run(_follow_standby(group, jobs, supervision.stopping), "executors of a standby")
                await _run_jobs(settings, supervision, health, session, jobs)
        await watching
        if group is not None:
            group.close()
        await run_blocking(session.stop, "spark-stop")
        await run_blocking(broker.close, "broker-close")
        await run_blocking(scratch.remove, "scratch-remove")  # after a failure the next start removes it


def _open(
    settings: TransformSettings,
    broker: SparkBroker,
    selected: SelectedPipes,
    scratch: Path,
    on_phase: Callable[[str], None],
) -> tuple[SparkSession, list[Prepared]]:
    sized, settings = settings.master == AUTO, size_master(settings, selected)
    session = open_session(
        master=settings.master,
        memory=settings.memory,
        kafka=broker.needs_kafka_jars,
        kafka_login=broker.needs_kafka_login,
        aws=broker.needs_aws_jars,
        databases=selected.needs_databases,
        scratch=scratch,
        cluster=cluster_of(settings),
        parallelism=AUTO_SLOTS if sized else None,
        ui=settings.spark_ui,
        compiler=settings.java_compiler,
        store=settings.object_store(selected),
        on_phase=on_phase,
    )
    on_phase("the transforms are analysed")
    prepared = prepare_pipes(session, selected, max_bytes=broker.max_record_bytes)
    check_suitability(session, settings, broker, selected, prepared)
    prepared = choose_modes(session, settings, broker, selected, prepared)
    return session, prepared


def cluster_of(settings: TransformSettings) -> Cluster | None:
    """None for a local master."""
    if settings.master_kind() is MasterKind.LOCAL:
        return None
    return Cluster(settings.driver_address(), settings.executor_settings())


def _control_of_executors(settings: TransformSettings) -> tuple[ExecutorGroup | None, list[RouteDef]]:
    """The group of executors and its routes, when somebody may resize it. Blocking. Raises BadConfiguration."""
    if settings.control_token_file is None or settings.master_kind() is MasterKind.LOCAL:
        return None, []
    group = ExecutorGroup(settings.master_kind(), settings.executor_settings())
    tokens = Tokens(read_tokens(settings.control_token_file))
    return group, GroupControl(group, tokens, whose="the transform").routes()


def _in_use(prepared: Sequence[Prepared], jobs: Sequence[Job]) -> Callable[[ReferenceTable], bool]:
    """Whether this process runs a pipe that reads this table."""
    readers = [(job, set(each.tables)) for job, each in zip(jobs, prepared, strict=True) if each.tables]
    return lambda table: any(job.holds_checkpoint and table.name in names for job, names in readers)


class Shown(NamedTuple):
    """What all pipes' reports say of their Spark, as in `SparkFigures`."""

    executors: Callable[[], int]
    ui: str


def _make_job(
    settings: TransformSettings,
    broker: SparkBroker,
    marks: Marks,
    health: PipesHealth,
    suspects: SuspectLock,
    clock: Callable[[], float],
    shown: Shown,
    prepared: Prepared,
) -> Job:
    call = partial(_call_soon, asyncio.get_running_loop())
    watchdog = Watchdog(settings.batch_timeout, clock)
    health.add_watchdog(prepared.pipe, watchdog)
    return Job(
        prepared,
        broker,
        marks,
        checkpoints=settings.checkpoint_root(),
        ledger=settings.ledger,
        watchdog=watchdog,
        suspects=suspects,
        on_batch=partial(call, health.record_batch),
        on_state=partial(call, health.record_state),
        on_backlog=partial(call, health.record_backlog, prepared.pipe),
        on_phase=lambda phase: call(health.record_phase, phase, prepared.pipe),
        executors=shown.executors,
        ui=shown.ui,
    )


def _call_soon(loop: asyncio.AbstractEventLoop, record: Callable[..., None], *arguments: Any) -> None:
    """Called from another thread. Does nothing once the loop has ended."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(record, *arguments)


async def _open_control(
    stack: AsyncExitStack, settings: TransformSettings, supervision: Supervision, health: PipesHealth
) -> tuple[Pauses, Marks] | None:
    """The pauses, followed until the stop, once they are known: a paused pipe must not start. And the marks of the transforms
    that have begun. None when the stop comes first.

    Raises BadConfiguration and DataDamaged.
    """
    stopping = supervision.stopping
    pipes = await asyncio.to_thread(load_pipe_file, settings.pipes)
    rights = rights_of("transform", pipes)
    opened = await open_when_reachable(
        stack, settings.broker, stopping, rights=rights, on_wait=health.record_waiting, pipes=pipes, own_only=True
    )
    if opened is None:
        return None
    pauses = Pauses(opened.reader)
    supervision.run(pauses.follow(stopping), "pauses")
    health.record_phase("reads which pipes are paused")
    while pauses.unknown is not None and not stopping.is_set():
        if pauses.unknown != NOT_READ:
            health.record_waiting(f"it is not known whether it is paused: {pauses.unknown}")
        await wait_for_stop(stopping, APPLY_EVERY_S)
    health.record_waiting(STARTING)
    if stopping.is_set():
        return None
    producer = await stack.enter_async_context(Producer(opened.appender))
    return pauses, BrokerMarks(opened.reader, producer)


async def _follow_pauses(pauses: Pauses, jobs: Sequence[Job], stopping: asyncio.Event) -> None:
    """Pause and resume jobs until the stop."""
    while not stopping.is_set():
        await wait_for_stop(stopping, APPLY_EVERY_S)
        _set_pauses(pauses, jobs)


def _set_pauses(pauses: Pauses, jobs: Sequence[Job]) -> None:
    paused = pauses.paused()
    for job in jobs:
        job.set_pause(paused.get(job.pipe))


async def _follow_standby(group: ExecutorGroup, jobs: Sequence[Job], stopping: asyncio.Event) -> None:
    """Until the stop. A master that does not take an order gets it again."""
    while not stopping.is_set():
        await wait_for_stop(stopping, WATCH_EVERY_S)
        works = any(job.holds_checkpoint for job in jobs)
        try:
            await group.set_standby(not works and any(job.stands_by for job in jobs))
        except SizeRefused as error:
            log.debug("executors_of_standby_unchanged", error=str(error))


async def watch_java(java: Java, health: PipesHealth, supervision: Supervision) -> None:
    """Until the stop. Raises JavaEndedError, BatchStuckError: only a new process helps then."""
    while not supervision.stopping.is_set():
        await wait_for_stop(supervision.stopping, WATCH_EVERY_S)
        if (status := java.poll()) is not None:
            raise JavaEndedError(
                f"Spark's Java ended: {why_ended(status)}. Try, if that happens again: a larger PENSTOCK_TRANSFORM_MEMORY "
                "(--memory), a smaller max_events"
            )
        if (stuck := health.stuck()) is not None:
            java.kill()  # it may be too busy to notice the end of this process
            raise BatchStuckError(
                f"{stuck}; the process ends and starts again. Try, if it needed the time: a longer "
                "PENSTOCK_TRANSFORM_BATCH_TIMEOUT (--batch-timeout)"
            )


async def follow_tasks(session: SparkSession, supervision: Supervision) -> None:
    """Until the stop. Java that does not answer is noticed elsewhere."""
    figures: TaskFigures | None = None

    def follow() -> None:
        nonlocal figures
        figures = figures or TaskFigures(session)  # its listener in Java stays, so it is made once
        figures.follow()

    while not supervision.stopping.is_set():
        try:
            await run_blocking(follow, "figures")
        except (*JAVA_ERRORS, OSError) as error:
            log.debug("tasks_not_counted", error=shorten(error))
        await wait_for_stop(supervision.stopping, FIGURES_EVERY_S)


async def watch_executors(
    executors: ExecutorWatch, session: SparkSession, health: PipesHealth, jobs: Sequence[Job], supervision: Supervision
) -> None:
    """Until the stop. Raises ExecutorsGoneError: only a new application helps then. Its batches have no part in that."""
    ended = threading.Event()

    def read() -> ExecutorState:
        return ExecutorState(live_executors(session), has_stopped(session))

    following = threading.Thread(
        target=executors.follow, args=[read, health.has_work, ended], name="executors", daemon=True
    )
    following.start()
    try:
        while not supervision.stopping.is_set():
            await wait_for_stop(supervision.stopping, WATCH_EVERY_S)
            executors.check()
    except ExecutorsGoneError:
        for job in jobs:
            await run_blocking(job.excuse, f"excuse-{job.pipe}")
        raise
    finally:
        ended.set()


async def _run_jobs(
    settings: TransformSettings, supervision: Supervision, health: PipesHealth, session: SparkSession, jobs: list[Job]
) -> None:
    tasks = [
        supervision.run(run_blocking(lambda job=job: job.run(session), f"job-{job.pipe}"), f"pipe {job.pipe}")  # type: ignore[misc]
        for job in jobs
    ]
    log.info("transforms_starting", pipes=[job.pipe for job in jobs])
    await _unless_stopped(health.gave_up.wait(), supervision)
    if not supervision.stopping.is_set():
        raise QueriesBrokenError(health.ready())
    for job in jobs:
        job.stop(settings.drain)
    await asyncio.wait(tasks)


async def _unless_stopped(work: Coroutine[Any, Any, T], supervision: Supervision) -> T | None:
    """The result, or None when the stop comes first; then the work is cancelled."""
    task, stopping = asyncio.ensure_future(work), asyncio.ensure_future(supervision.stopping.wait())
    try:
        await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        stopping.cancel()


async def run_blocking(work: Callable[[], T], name: str) -> T:
    """Run `work` on a daemon thread of its own, which never holds up the end of the process, and wait for it.

    Cancelling ends the waiting, not the thread.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]  # None only when T is None

    def run() -> None:
        result, failure = None, None
        try:
            result = work()
        except BaseException as error:
            failure = error
        try:
            loop.call_soon_threadsafe(finish, result, failure)
        except RuntimeError:
            return  # the loop has ended

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
