"""What a pipe's checkpoint promises: one query at a time, no batch twice, and a loud stop when it is not what was left."""

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from pyspark.sql import SparkSession

from services.core.broker.contract import TopicSpec
from services.core.broker.log import blocking
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.topics import create_topic, delete_topic
from services.core.broker.record import Record
from services.core.control.pauses import Pause
from services.core.event import read_id
from spark.brokers.contract import measure_backlog
from spark.brokers.log import LogSparkBroker
from spark.health import QueryState, Watchdog
from spark.jobs.attempts import Attempt, Attempts
from spark.jobs.checkpoint import CheckpointDamaged, open_checkpoint
from spark.jobs.claims import CheckpointInUse
from spark.jobs.culprits import ALL_FAILED, FailureStreak
from spark.jobs.job import Job
from spark.jobs.query import Query
from spark.jobs.start_checks import adopt_checkpoint, check_not_older
from spark.jobs.state_store import checkpoint_version
from spark.settings import SelectedPipes
from tests.spark.log_pipeline import DEADLINE_S, LogPipeline, event, interrupt_queries, wait_for

COLUMNS = "delay INT"


def flights(start: int, end: int) -> list[Record]:
    return [event(n, orjson.dumps({"delay": n})) for n in range(start, end)]


def run_first(pipeline: LogPipeline) -> tuple[SelectedPipes, Path]:
    """A pipe that has done 30 events in several batches, and its checkpoint."""
    pipeline.send(flights(0, 30))
    chosen = pipeline.pipe(columns=COLUMNS, sql="SELECT event, delay FROM s", max_events=10)
    pipeline.run(chosen, 30)
    return chosen, pipeline.folder / "checkpoints" / "p"


def ids(pipeline: LogPipeline) -> list[str | None]:
    return sorted((read_id(r) for r in pipeline.out), key=str)


def test_goes_on_where_it_stopped(pipeline: LogPipeline) -> None:
    """If this fails, a restart repeats or leaves out events."""
    chosen, _ = run_first(pipeline)
    pipeline.send(flights(30, 60))
    pipeline.run(chosen, 60)
    assert ids(pipeline) == sorted(f"id-{n}" for n in range(60))


@pytest.mark.parametrize("watermark", [None, "1h"])
def test_paused_until_resumed(pipeline: LogPipeline, watermark: str | None) -> None:
    """If this fails, a pause does not stop a query, hides its backlog, or repeats or leaves out events."""
    sql = "SELECT event, delay FROM s"
    if watermark is not None:  # a part of the streaming plan, with a checkpoint for each of its two queries
        sql = "SELECT s.event, s.delay FROM s JOIN u ON s.event.id = u.event.id AND s.event_time = u.event_time"
    pipeline.send(flights(0, 30))
    pipeline.send(flights(0, 60), "u")
    sources = ["s"] if watermark is None else ["s", "u"]
    chosen = pipeline.pipe(columns=COLUMNS, sources=sources, sql=sql, watermark=watermark, max_events=20)
    job = pipeline.start(chosen)
    wait_for(lambda: len(pipeline.out) == 30, "the events before the pause")
    wait_for(
        lambda: bool(pipeline.backlogs) and not sum(pipeline.backlogs[-1].values()), "the other source is read, too"
    )
    job.set_pause(Pause("paused", "operator", "ann", 0, "wrong VAT"))
    wait_for(lambda: bool(pipeline.states[-1].paused), "the pause")
    assert pipeline.states[-1] == QueryState("p", None, 0, paused="paused by ann: wrong VAT")
    pipeline.send(flights(30, 60))
    wait_for(lambda: sum(pipeline.backlogs[-1].values()) == 30, "the backlog of a paused pipe")
    assert len(pipeline.out) == 30
    job.set_pause(None)
    wait_for(lambda: len(pipeline.out) >= 60, "the events that waited")
    pipeline.stop()
    assert ids(pipeline) == sorted(f"id-{n}" for n in range(60))
    assert pipeline.problem == "starting"  # after the resume; the query never failed


class LongBatch:
    """A running query whose batch never ends."""

    def __init__(self) -> None:
        self.stopping, self.abandoned = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.stopping.wait(0.01)

    def has_completed_trigger(self) -> bool:
        return True

    def stop(self, may_wait: Callable[[], bool]) -> None:
        self.stopping.set()
        while may_wait():
            self.abandoned.wait(0.01)
        self.abandoned.set()


@pytest.mark.parametrize("resumes", [False, True])
def test_a_stop_limits_the_wait_for_the_batch_of_a_pause(
    pipeline: LogPipeline, monkeypatch: pytest.MonkeyPatch, resumes: bool
) -> None:
    """If this fails, a stop during a pause waits for a long batch until the process is killed, or a resume abandons the batch."""
    running = LongBatch()
    monkeypatch.setattr(Job, "_start", lambda _job, _query: running)
    chosen = pipeline.pipe(columns=COLUMNS, sql="SELECT event, delay FROM s")
    job = pipeline.start(chosen)
    wait_for(lambda: bool(pipeline.states) and pipeline.states[-1].problem is None, "the query")
    job.set_pause(Pause("paused", "operator", "ann", 0))
    assert running.stopping.wait(600)
    if resumes:
        job.set_pause(None)
    assert not running.abandoned.wait(0.2)
    job.stop(0.1)
    assert running.abandoned.wait(240), "the limit of a batch is five minutes"


def test_a_stop_is_no_end_that_a_batch_caused(
    pipeline: LogPipeline, monkeypatch: pytest.MonkeyPatch, spark: SparkSession
) -> None:
    """If this fails, a batch that was planned while the service was stopped counts as one that ended the process: a warning after
    each Ctrl-C, and parts after the second one."""
    running = LongBatch()
    monkeypatch.setattr(Job, "_start", lambda _job, _query: running)
    prepared = pipeline.prepare(pipeline.pipe(columns=COLUMNS, sql="SELECT event, delay FROM s"))
    job = pipeline.start_prepared(prepared)
    wait_for(lambda: bool(pipeline.states) and pipeline.states[-1].problem is None, "the query")
    offsets = Path(pipeline.checkpoints, "p", "offsets")
    offsets.mkdir(exist_ok=True)
    (offsets / "0").write_text("v1\n{}\n-\n")
    job.stop(0.0)
    assert running.abandoned.wait(600)
    pipeline.stop()
    with open_checkpoint(spark, pipeline.checkpoints, "p") as checkpoint:
        attempts = Attempts(prepared.version)
        attempts.open(checkpoint)
        assert (attempts.of(0), attempts.ended) == (Attempt(0, prepared.version), 0)


def test_transform_may_change(pipeline: LogPipeline) -> None:
    """If this fails, an operator cannot deploy a new version of a transform without starting over."""
    run_first(pipeline)
    pipeline.send(flights(30, 40))
    pipeline.run(pipeline.pipe(columns=COLUMNS, sql="SELECT event, delay + 1 AS later FROM s", max_events=10), 40)
    assert ids(pipeline) == sorted(f"id-{n}" for n in range(40))
    assert sum(b"later" in (r.value or b"") for r in pipeline.out) == 10


def test_batch_that_was_stored_is_not_stored_again(pipeline: LogPipeline) -> None:
    """If this fails, a crash between the output's commit and Spark's own note of it doubles a batch."""
    chosen, checkpoint = run_first(pipeline)
    newest = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit())
    (checkpoint / "commits" / str(newest)).unlink()
    (checkpoint / "commits" / f".{newest}.crc").unlink()
    pipeline.send(flights(30, 40))
    pipeline.run(chosen, 50)
    assert ids(pipeline) == sorted(f"id-{n}" for n in range(40))


def newest(folder: Path) -> Path:
    return max((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))


def truncate(checkpoint: Path) -> None:
    path = newest(checkpoint / "offsets")
    path.write_bytes(path.read_bytes()[:10])


def empty(checkpoint: Path) -> None:
    path = newest(checkpoint / "offsets")
    path.write_bytes(b"")
    (path.parent / f".{path.name}.crc").unlink()


def flip(checkpoint: Path) -> None:
    path = newest(checkpoint / "offsets")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def truncate_commit(checkpoint: Path) -> None:
    path = newest(checkpoint / "commits")
    path.write_bytes(path.read_bytes()[:1])


def flip_commit(checkpoint: Path) -> None:
    path = newest(checkpoint / "commits")
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)


def remove_offsets(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint / "offsets")
    shutil.rmtree(checkpoint / "commits")


def roll_back(checkpoint: Path) -> None:
    for folder in ("offsets", "commits"):
        for path in (checkpoint / folder).iterdir():
            if path.name.strip(".").removesuffix(".crc") not in ("0", "1"):
                path.unlink()


def remove_previous(checkpoint: Path) -> None:
    """Only the newest batch is left, as when the files were removed while the query ran."""
    names = [int(path.name) for path in (checkpoint / "offsets").iterdir() if path.name.isdigit()]
    (checkpoint / "offsets" / str(max(names) - 1)).unlink()


def remove_metadata(checkpoint: Path) -> None:
    (checkpoint / "metadata").unlink()


def remove_identity(checkpoint: Path) -> None:
    (checkpoint / "penstock.json").unlink()


def garble_identity(checkpoint: Path) -> None:
    (checkpoint / "penstock.json").write_text("{")


def make_newer(checkpoint: Path) -> None:
    identity = orjson.loads((checkpoint / "penstock.json").read_bytes())
    (checkpoint / "penstock.json").write_bytes(orjson.dumps(identity | {"version": 3}))


HARMS = [truncate, empty, flip, truncate_commit, flip_commit]
HARMS += [remove_offsets, remove_previous, roll_back, remove_metadata, remove_identity, garble_identity, make_newer]


def test_damaged_checkpoint_is_refused(pipeline: LogPipeline, spark: SparkSession) -> None:
    """If this fails, damage to a checkpoint silently loses or repeats events."""
    chosen, place = run_first(pipeline)
    prepared = pipeline.prepare(chosen)
    broker = LogSparkBroker(str(pipeline.log))
    topics = broker.identify(spark, ["s"])

    def take(root: Path) -> None:
        with open_checkpoint(spark, str(root), "p") as checkpoint:
            identity = adopt_checkpoint(checkpoint, prepared, topics, pipeline.marks)
            writer = f"p:{identity.id}"
            reported, stop, attempts = pipeline.batches.append, threading.Event(), Attempts(prepared.version)
            check_not_older(
                Query(spark, prepared, broker, checkpoint, writer, reported, True, stop, attempts, Watchdog(DEADLINE_S))
            )

    take(place.parent)
    for harm in HARMS:
        copy = pipeline.folder / harm.__name__
        shutil.copytree(place, copy / "p")
        harm(copy / "p")
        with pytest.raises(CheckpointDamaged, match="Try:"):
            take(copy)


def test_older_copy_is_refused_whatever_it_wrote(pipeline: LogPipeline) -> None:
    """If this fails, a restored checkpoint gives dead letters the numbers of stored ones, and they vanish."""
    chosen, _ = run_first(pipeline)
    for name in ("dead", "late", "rejects:dead"):
        topic, bad = "p.dead", event(1000, b"{}")
        with pipeline.query(chosen) as query:
            check_not_older(query)
            assert blocking.append_once(pipeline.log, topic, f"{query.writer}:{name}", 1000, {0: [bad]})
            with pytest.raises(CheckpointDamaged, match=r"'p\.dead' at batch 1000: it is an older copy"):
                check_not_older(query)
        delete_topic(DataFolder.prepare(pipeline.log), topic)
        create_topic(DataFolder.prepare(pipeline.log), TopicSpec(topic, 3))


@pytest.mark.parametrize(
    "harm", [lambda content: content[: len(content) // 2], lambda content: content[:-9] + b"123456789"]
)
def test_damaged_state_stops_the_query(pipeline: LogPipeline, harm: Callable[[bytes], bytes]) -> None:
    """If this fails, ids that were seen are forgotten without a word, and duplicates come out."""
    pipeline.send(flights(0, 30))
    chosen = pipeline.pipe(columns=COLUMNS, sql="SELECT event, delay FROM s", deduplicate_within="1h", max_events=10)
    pipeline.run(chosen, 30)
    state = pipeline.folder / "checkpoints" / "p" / "state"
    files = [path for path in state.rglob("*.changelog") if path.name[0] != "."]
    last = max(int(path.name.partition("_")[0]) for path in files)
    for path in files:
        if path.name.startswith(f"{last}_"):
            path.write_bytes(harm(path.read_bytes()))
    _forget_loaded_state(pipeline)
    pipeline.send(flights(0, 40))
    pipeline.start(chosen)
    wait_for(lambda: pipeline.problem is not None, "the query refuses the state")
    pipeline.stop()
    assert not any(state.problem is None for state in pipeline.states[1:])
    assert ids(pipeline) == sorted(f"id-{n}" for n in range(30))


def test_state_stays_where_an_earlier_version_began_it(pipeline: LogPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, an update forgets the ids that were seen, or refuses to start; or a new checkpoint is read by a version that
    does not know its files.
    """
    pipeline.send(flights(0, 30))
    chosen = pipeline.pipe(columns=COLUMNS, sql="SELECT event, delay FROM s", deduplicate_within="1h", max_events=10)
    with monkeypatch.context() as earlier:
        earlier.setattr("spark.jobs.state_store.needs_state", lambda _prepared: False)
        pipeline.run(chosen, 30)
    folder = pipeline.folder / "checkpoints" / "p"
    assert list((folder / "state").rglob("*.delta"))
    _forget_loaded_state(pipeline)
    pipeline.send(flights(0, 40))
    pipeline.run(chosen, 40)
    assert ids(pipeline) == sorted(f"id-{n}" for n in range(40))
    assert not list((folder / "state").rglob("*.changelog"))
    assert orjson.loads((folder / "penstock.json").read_bytes())["version"] == 1
    shutil.rmtree(folder)
    pipeline.marks.newest.clear()
    with pipeline.query(chosen) as query:
        assert checkpoint_version(query.prepared, query.checkpoint) == 2


def _forget_loaded_state(pipeline: LogPipeline) -> None:
    """As a new process would: Spark keeps state in memory while its session lives."""
    jvm: Any = pipeline.session.sparkContext._jvm
    store = getattr(jvm.org.apache.spark.sql.execution.streaming.state, "StateStore$")
    getattr(store, "MODULE$").stop()


def test_damaged_checkpoint_stops_the_query(pipeline: LogPipeline) -> None:
    """If this fails, the query runs on regardless, or says nothing."""
    chosen, checkpoint = run_first(pipeline)
    roll_back(checkpoint)
    pipeline.send(flights(30, 60))
    pipeline.start(chosen)
    wait_for(lambda: pipeline.problem is not None, "the query refuses the checkpoint")
    pipeline.stop()
    assert "CheckpointDamaged" in (pipeline.problem or "")
    assert ids(pipeline) == sorted(f"id-{n}" for n in range(30))


def test_one_query_on_a_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    """If this fails, two queries on one checkpoint do each event twice."""
    first = open_checkpoint(spark, str(tmp_path), "p")
    with first, pytest.raises(CheckpointInUse, match="in use by process"), open_checkpoint(spark, str(tmp_path), "p"):
        pass
    with open_checkpoint(spark, str(tmp_path), "p"):
        pass


def test_a_second_process_stands_by(pipeline: LogPipeline) -> None:
    """If this fails, two services on one folder do each event twice, or an update that starts the next one first never ends."""
    chosen, _ = run_first(pipeline)
    first = pipeline.start(chosen)
    wait_for(lambda: bool(pipeline.states) and pipeline.states[-1].problem is None, "the query runs")
    pipeline.start(chosen)
    wait_for(lambda: bool(pipeline.states[-1].standby), "the second one stands by")
    assert "in use by process" in pipeline.states[-1].standby
    pipeline.send(flights(30, 60))
    wait_for(lambda: len(pipeline.out) == 60, "the first one goes on")
    first.stop(30.0)
    wait_for(lambda: pipeline.states[-1] == QueryState("p", None, 0), "the second one takes over")
    pipeline.send(flights(60, 90))
    wait_for(lambda: len(pipeline.out) >= 90, "it runs the pipe")
    pipeline.stop()
    assert all(state.failures == 0 for state in pipeline.states)
    assert ids(pipeline) == sorted(f"id-{n}" for n in range(90))


def test_dead_query_is_reported_and_started_again(pipeline: LogPipeline) -> None:
    """If this fails, a query that ended in a process that lives stays dead, and nobody knows."""
    chosen, _ = run_first(pipeline)
    pipeline.start(chosen)
    wait_for(lambda: len(pipeline.states) >= 2, "the query runs")
    interrupt_queries(pipeline.session)
    wait_for(lambda: pipeline.problem is not None, "its end is reported")
    pipeline.send(flights(30, 60))
    wait_for(lambda: pipeline.read >= 60, "it runs again")
    pipeline.stop()
    assert pipeline.states[-1].problem is None
    assert ids(pipeline) == sorted(f"id-{n}" for n in range(60))


def test_backlog_is_known_without_a_query(pipeline: LogPipeline) -> None:
    """If this fails, nobody sees how far a pipe is behind while its query is down."""
    chosen, _ = run_first(pipeline)
    pipeline.send(flights(30, 45))
    with pipeline.query(chosen) as query:
        found = measure_backlog(
            query.broker.stored_ranges(query.session, ["s", "u"]),
            query.checkpoint.committed_offsets(query.broker.parse_offsets),
        )
    assert sum(found.values()) == 15
    assert {topic for topic, _ in found} == {"s", "u"}


def test_failures_in_a_row_are_counted_over_restarts(pipeline: LogPipeline, tmp_path: Path) -> None:
    """If this fails, a broken transform on a slow stream moves all of it to the dead letters, a few events a restart."""
    sql = "SELECT event, 1 DIV delay AS share FROM s"
    chosen = pipeline.pipe(columns=COLUMNS, sql=sql, interval="10ms")
    with pipeline.query(chosen) as query:
        FailureStreak(query.checkpoint).add(ALL_FAILED - 2, 0, "")
    pipeline.send([event(1, b'{"delay":0}')])
    pipeline.run(chosen, 1)
    assert len(pipeline.dead) == 1
    pipeline.send([event(2, b'{"delay":0}')])
    pipeline.start(chosen)
    wait_for(
        lambda: len([state for state in pipeline.states if state.problem]) >= 2, "it fails, and after a restart again"
    )
    pipeline.stop()
    assert "TransformBroken: it failed on the last 20 events" in (pipeline.problem or "")
    assert len(pipeline.dead) == 1
    pipeline.states.clear()
    pipeline.run(pipeline.pipe(columns=COLUMNS, sql="SELECT event, delay FROM s"), 2)
    with pipeline.query(chosen) as query:
        FailureStreak(query.checkpoint).add(1, 0, "")
    assert len(pipeline.out) == 1


def test_recreated_topic_stops_the_query(pipeline: LogPipeline) -> None:
    """If this fails, a topic that was made again is read from an offset that means other records."""
    chosen, _ = run_first(pipeline)
    folder = DataFolder.prepare(pipeline.log)
    delete_topic(folder, "s")
    create_topic(folder, TopicSpec("s", 3))
    pipeline.send(flights(100, 200))
    pipeline.start(chosen)
    wait_for(lambda: pipeline.problem is not None, "the query stops")
    pipeline.stop()
    assert "created again" in (pipeline.problem or "")
    assert len(pipeline.out) == 30


def test_recreated_topic_stops_a_running_query(pipeline: LogPipeline) -> None:
    """If this fails, the same happens unseen while the query runs."""
    chosen, _ = run_first(pipeline)
    pipeline.start(chosen)
    wait_for(lambda: len(pipeline.states) >= 2, "the query runs")
    folder = DataFolder.prepare(pipeline.log)
    delete_topic(folder, "s")
    create_topic(folder, TopicSpec("s", 3))
    pipeline.send(flights(100, 200))
    wait_for(lambda: pipeline.problem is not None, "the query stops")
    pipeline.stop()
    assert len(pipeline.out) == 30
