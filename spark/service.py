"""The transform service: one Spark session, one job per pipe, one management port."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

import structlog
from pyspark.sql import SparkSession

from services.core.lifecycle import Supervision, wait_for_stop
from services.core.management import serve_management
from spark.board import Board
from spark.brokers.endpoint import Endpoint
from spark.brokers.opening import open_endpoint
from spark.jobs.job import Job
from spark.jobs.pulse import Pulse
from spark.jobs.turn import Turn
from spark.pipe_file import Chosen, read_pipe_file
from spark.session import open_session
from spark.settings import TransformSettings
from spark.suitability import check_suitability
from spark.threads import run_blocking
from spark.transforms.preparation import Prepared, prepare_pipes

T = TypeVar("T")
log = structlog.get_logger()


WATCH_EVERY_S = 0.5
_OUT_OF_MEMORY = 3
"""The status of a Java that ended so."""


class Java(Protocol):
    """The process that runs Spark; as `subprocess.Popen`."""

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""

    def kill(self) -> None:
        """End it."""


class JavaEndedError(RuntimeError):
    """Spark's Java is gone, and nothing works without it."""


class BatchStuckError(RuntimeError):
    """A batch has taken longer than it may."""


class QueriesBrokenError(RuntimeError):
    """No pipe's query can be kept running, or one cannot in this Java, and starting it again has not helped. The log says why."""


async def start(settings: TransformSettings, supervision: Supervision) -> None:
    """Run the chosen pipes until the stop. Raises BadConfiguration for whatever can be known before an event is read."""
    chosen = await run_blocking(lambda: read_pipe_file(settings), "pipes")
    board = Board(chosen.names)
    async with serve_management(settings.management, board.ready) as address:
        log.info("management port open", address=address)
        if not chosen.names:
            log.warning("no pipe has a transform: nothing to do", pipes=str(settings.pipes))
            await supervision.stopping.wait()
            return
        endpoint = open_endpoint(settings.broker)
        opened = await _unless_stopped(run_blocking(lambda: _open(settings, endpoint, chosen), "spark"), supervision)
        if opened is None:
            return
        session, prepared = opened
        turn = Turn()
        jobs = [_job(settings, endpoint, board, turn, each) for each in prepared]
        gateway: Any = session.sparkContext._gateway
        java = gateway.proc
        watching = supervision.run(watch(java, board, supervision), "watch over Java")
        await _run_jobs(settings, supervision, board, session, jobs)
        await watching
        await run_blocking(session.stop, "spark-stop")
        await run_blocking(endpoint.close, "broker-close")


def _open(settings: TransformSettings, endpoint: Endpoint, chosen: Chosen) -> tuple[SparkSession, list[Prepared]]:
    session = open_session(master=settings.master, memory=settings.memory, kafka=endpoint.needs_kafka_jars)
    prepared = prepare_pipes(session, chosen, max_bytes=endpoint.max_record_bytes)
    check_suitability(session, settings, endpoint, chosen, prepared)
    return session, prepared


def _job(settings: TransformSettings, endpoint: Endpoint, board: Board, turn: Turn, prepared: Prepared) -> Job:
    loop = asyncio.get_running_loop()
    pulse = Pulse(settings.batch_timeout)
    board.watch(prepared.pipe, pulse)
    return Job(
        prepared,
        endpoint,
        checkpoints=settings.checkpoint_root(),
        ledger=settings.ledger,
        pulse=pulse,
        turn=turn,
        on_batch=lambda report: _tell(loop, lambda: board.note_batch(report)),
        on_state=lambda state: _tell(loop, lambda: board.note_state(state)),
        on_backlog=lambda backlog: _tell(loop, lambda: board.note_backlog(prepared.pipe, backlog)),
    )


async def watch(java: Java, board: Board, supervision: Supervision) -> None:
    """Until the stop. Raises JavaEndedError, BatchStuckError: only a new process goes on from there."""
    while not supervision.stopping.is_set():
        await wait_for_stop(supervision.stopping, WATCH_EVERY_S)
        if (status := java.poll()) is not None:
            why = "it ran out of memory" if status == _OUT_OF_MEMORY else f"status {status}"
            raise JavaEndedError(
                f"Spark's Java ended: {why}. Try, if that comes again: more --memory, fewer max_events"
            )
        if (stuck := board.stuck()) is not None:
            java.kill()  # it may be too busy to notice that we have gone
            raise BatchStuckError(
                f"{stuck}; the process ends and starts again. Try, if it was at work: a longer --batch-timeout"
            )


async def _run_jobs(
    settings: TransformSettings, supervision: Supervision, board: Board, session: SparkSession, jobs: list[Job]
) -> None:
    tasks = [
        supervision.run(run_blocking(lambda job=job: job.run(session), f"job-{job.pipe}"), f"pipe {job.pipe}")  # type: ignore[misc]
        for job in jobs
    ]
    log.info("transforms starting", pipes=[job.pipe for job in jobs])
    await _unless_stopped(board.given_up.wait(), supervision)
    if not supervision.stopping.is_set():
        raise QueriesBrokenError(board.ready())
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


def _tell(loop: asyncio.AbstractEventLoop, note: Callable[[], None]) -> None:
    """From a job's thread. After the loop's end nobody listens."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(note)
