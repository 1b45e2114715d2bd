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
from services.core.broker.log.layout import DataFolder
from services.core.broker.log.topics import create_topic, delete_topic
from services.core.broker.record import Record
from services.core.event import read_id
from spark.adoption import adopt, check_not_older
from spark.brokers.gauge import measure_backlog
from spark.brokers.log import LogEndpoint
from spark.checkpoint import CheckpointDamaged, CheckpointInUse, open_checkpoint
from spark.jobs.parts import Attempts
from spark.jobs.pulse import Pulse
from spark.jobs.query import Query
from spark.jobs.streak import ALL_FAILED, Streak
from spark.pipe_file import Chosen
from tests.spark.river import DEADLINE_S, River, event, interrupt_queries, wait_for

COLUMNS = "delay INT"


def flights(start: int, end: int) -> list[Record]:
    return [event(n, orjson.dumps({"delay": n})) for n in range(start, end)]


def run_first(river: River) -> tuple[Chosen, Path]:
    """A pipe that has done 30 events in several batches, and its checkpoint."""
    river.send(flights(0, 30))
    chosen = river.pipe(columns=COLUMNS, sql="SELECT event, delay FROM s", max_events=10)
    river.run(chosen, 30)
    return chosen, river.folder / "checkpoints" / "p"


def ids(river: River) -> list[str | None]:
    return sorted((read_id(r) for r in river.out), key=str)


def test_goes_on_where_it_stopped(river: River) -> None:
    """If this fails, a restart repeats or leaves out events."""
    chosen, _ = run_first(river)
    river.send(flights(30, 60))
    river.run(chosen, 60)
    assert ids(river) == sorted(f"id-{n}" for n in range(60))


def test_transform_may_change(river: River) -> None:
    """If this fails, an operator cannot deploy a new version of a transform without starting over."""
    run_first(river)
    river.send(flights(30, 40))
    river.run(river.pipe(columns=COLUMNS, sql="SELECT event, delay + 1 AS later FROM s", max_events=10), 40)
    assert ids(river) == sorted(f"id-{n}" for n in range(40))
    assert sum(b"later" in (r.value or b"") for r in river.out) == 10


def test_batch_that_was_stored_is_not_stored_again(river: River) -> None:
    """If this fails, a crash between the output's commit and Spark's own note of it doubles a batch."""
    chosen, checkpoint = run_first(river)
    newest = max(int(path.name) for path in (checkpoint / "commits").iterdir() if path.name.isdigit())
    (checkpoint / "commits" / str(newest)).unlink()
    (checkpoint / "commits" / f".{newest}.crc").unlink()
    river.send(flights(30, 40))
    river.run(chosen, 50)
    assert ids(river) == sorted(f"id-{n}" for n in range(40))


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


def remove_metadata(checkpoint: Path) -> None:
    (checkpoint / "metadata").unlink()


def remove_identity(checkpoint: Path) -> None:
    (checkpoint / "penstock.json").unlink()


def garble_identity(checkpoint: Path) -> None:
    (checkpoint / "penstock.json").write_text("{")


HARMS = [truncate, empty, flip, truncate_commit, flip_commit]
HARMS += [remove_offsets, roll_back, remove_metadata, remove_identity, garble_identity]


def test_damaged_checkpoint_is_refused(river: River, spark: SparkSession) -> None:
    """If this fails, damage to a checkpoint silently loses or repeats events."""
    chosen, place = run_first(river)
    prepared = river.prepare(chosen)
    endpoint = LogEndpoint(str(river.log))
    topics = endpoint.check(spark, ["s"])

    def take(root: Path) -> None:
        with open_checkpoint(spark, str(root), "p") as checkpoint:
            identity = adopt(checkpoint, prepared, topics)
            writer = f"p:{identity.id}"
            told, stop, attempts = river.batches.append, threading.Event(), Attempts(prepared.version)
            check_not_older(
                Query(spark, prepared, endpoint, checkpoint, writer, told, True, stop, attempts, Pulse(DEADLINE_S))
            )

    take(place.parent)
    for harm in HARMS:
        copy = river.folder / harm.__name__
        shutil.copytree(place, copy / "p")
        harm(copy / "p")
        with pytest.raises(CheckpointDamaged, match="Try:"):
            take(copy)


def test_older_copy_is_refused_whatever_it_wrote(river: River) -> None:
    """If this fails, a restored checkpoint gives dead letters the numbers of stored ones, and they vanish."""
    chosen, _ = run_first(river)
    for name in ("dead", "late", "rejects:dead"):
        topic, bad = "p.dead", event(1000, b"{}")
        with river.query(chosen) as query:
            check_not_older(query)
            assert blocking.append_once(river.log, topic, f"{query.writer}:{name}", 1000, {0: [bad]})
            with pytest.raises(CheckpointDamaged, match=r"'p\.dead' at batch 1000: it is an older copy"):
                check_not_older(query)
        delete_topic(DataFolder.prepare(river.log), topic)
        create_topic(DataFolder.prepare(river.log), TopicSpec(topic, 3))


@pytest.mark.parametrize(
    "harm", [lambda content: content[: len(content) // 2], lambda content: content[:-9] + b"123456789"]
)
def test_damaged_state_stops_the_query(river: River, harm: Callable[[bytes], bytes]) -> None:
    """If this fails, ids that were seen are forgotten without a word, and duplicates come out."""
    river.send(flights(0, 30))
    chosen = river.pipe(columns=COLUMNS, sql="SELECT event, delay FROM s", deduplicate_within="1h", max_events=10)
    river.run(chosen, 30)
    files = [path for path in (river.folder / "checkpoints" / "p" / "state").rglob("*.delta") if path.name[0] != "."]
    last = max(int(path.stem) for path in files)
    for path in files:
        if int(path.stem) == last:
            path.write_bytes(harm(path.read_bytes()))
    _forget_loaded_state(river)
    river.send(flights(0, 40))
    river.start(chosen)
    wait_for(lambda: river.problem is not None, "the query refuses the state")
    river.stop()
    assert not any(state.problem is None for state in river.states[1:])
    assert ids(river) == sorted(f"id-{n}" for n in range(30))


def _forget_loaded_state(river: River) -> None:
    """As a new process would: Spark keeps state in memory while its session lives."""
    jvm: Any = river.session.sparkContext._jvm
    store = getattr(jvm.org.apache.spark.sql.execution.streaming.state, "StateStore$")
    getattr(store, "MODULE$").stop()


def test_damaged_checkpoint_stops_the_query(river: River) -> None:
    """If this fails, the query runs on regardless, or says nothing."""
    chosen, checkpoint = run_first(river)
    roll_back(checkpoint)
    river.send(flights(30, 60))
    river.start(chosen)
    wait_for(lambda: river.problem is not None, "the query refuses the checkpoint")
    river.stop()
    assert "CheckpointDamaged" in (river.problem or "")
    assert ids(river) == sorted(f"id-{n}" for n in range(30))


def test_one_query_on_a_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    """If this fails, two queries on one checkpoint do each event twice."""
    first = open_checkpoint(spark, str(tmp_path), "p")
    with first, pytest.raises(CheckpointInUse, match="in use by process"), open_checkpoint(spark, str(tmp_path), "p"):
        pass
    with open_checkpoint(spark, str(tmp_path), "p"):
        pass


def test_second_query_on_a_checkpoint_is_refused(river: River) -> None:
    """If this fails, two services on one data folder do each event twice, or the second one says nothing."""
    chosen, _ = run_first(river)
    river.start(chosen)
    wait_for(lambda: len(river.states) >= 2, "the query runs")
    river.start(chosen)
    wait_for(lambda: river.problem is not None, "the second one refuses")
    assert "in use by process" in (river.problem or "")
    river.send(flights(30, 60))
    wait_for(lambda: river.read >= 60, "the first one goes on")
    river.stop()
    assert ids(river) == sorted(f"id-{n}" for n in range(60))


def test_dead_query_is_told_and_started_again(river: River) -> None:
    """If this fails, a query that ended in a process that lives stays dead, and nobody is told."""
    chosen, _ = run_first(river)
    river.start(chosen)
    wait_for(lambda: len(river.states) >= 2, "the query runs")
    interrupt_queries(river.session)
    wait_for(lambda: river.problem is not None, "its end is told")
    river.send(flights(30, 60))
    wait_for(lambda: river.read >= 60, "it runs again")
    river.stop()
    assert river.states[-1].problem is None
    assert ids(river) == sorted(f"id-{n}" for n in range(60))


def test_backlog_is_known_without_a_query(river: River) -> None:
    """If this fails, nobody sees how far a pipe is behind while its query is down."""
    chosen, _ = run_first(river)
    river.send(flights(30, 45))
    with river.query(chosen) as query:
        found = measure_backlog(
            query.endpoint.held(query.session, ["s", "u"]), query.checkpoint.done_up_to(query.endpoint.parse_position)
        )
    assert sum(found.values()) == 15
    assert {topic for topic, _ in found} == {"s", "u"}


def test_failures_in_a_row_are_counted_over_restarts(river: River, tmp_path: Path) -> None:
    """If this fails, a broken transform on a slow stream moves all of it to the dead letters, a few events a restart."""
    sql = "SELECT event, 1 DIV delay AS share FROM s"
    chosen = river.pipe(columns=COLUMNS, sql=sql, interval="10ms")
    with river.query(chosen) as query:
        Streak(query.checkpoint).extend(ALL_FAILED - 2, 0, "")
    river.send([event(1, b'{"delay":0}')])
    river.run(chosen, 1)
    assert len(river.dead) == 1
    river.send([event(2, b'{"delay":0}')])
    river.start(chosen)
    wait_for(
        lambda: len([state for state in river.states if state.problem]) >= 2, "it fails, and after a restart again"
    )
    river.stop()
    assert "TransformBroken: it failed on the last 20 events" in (river.problem or "")
    assert len(river.dead) == 1
    river.states.clear()
    river.run(river.pipe(columns=COLUMNS, sql="SELECT event, delay FROM s"), 2)
    with river.query(chosen) as query:
        Streak(query.checkpoint).extend(1, 0, "")
    assert len(river.out) == 1


def test_recreated_topic_stops_the_query(river: River) -> None:
    """If this fails, a topic that was made again is read from an offset that means other records."""
    chosen, _ = run_first(river)
    folder = DataFolder.prepare(river.log)
    delete_topic(folder, "s")
    create_topic(folder, TopicSpec("s", 3))
    river.send(flights(100, 200))
    river.start(chosen)
    wait_for(lambda: river.problem is not None, "the query stops")
    river.stop()
    assert "made again" in (river.problem or "")
    assert len(river.out) == 30


def test_recreated_topic_stops_a_running_query(river: River) -> None:
    """If this fails, the same happens unseen while the query runs."""
    chosen, _ = run_first(river)
    river.start(chosen)
    wait_for(lambda: len(river.states) >= 2, "the query runs")
    folder = DataFolder.prepare(river.log)
    delete_topic(folder, "s")
    create_topic(folder, TopicSpec("s", 3))
    river.send(flights(100, 200))
    wait_for(lambda: river.problem is not None, "the query stops")
    river.stop()
    assert len(river.out) == 30
