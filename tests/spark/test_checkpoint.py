"""What a pipe's checkpoint promises: one query at a time, no batch twice, and a loud stop when it is not what was left."""

import shutil
from pathlib import Path

import orjson
import pytest
from pyspark.sql import SparkSession

from services.core.broker.contract import TopicSpec
from services.core.broker.log.layout import DataFolder
from services.core.broker.log.topics import create_topic, delete_topic
from services.core.broker.record import Record
from services.core.event import read_id
from spark.adoption import adopt, check_not_older
from spark.brokers.log import LogEndpoint
from spark.checkpoint import CheckpointDamaged, CheckpointInUse, open_checkpoint
from spark.pipe_file import Chosen
from tests.spark.river import River, event, wait_for

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


def truncate(checkpoint: Path) -> None:
    newest = max((p for p in (checkpoint / "offsets").iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    newest.write_bytes(newest.read_bytes()[:10])


def empty(checkpoint: Path) -> None:
    newest = max((p for p in (checkpoint / "offsets").iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    newest.write_bytes(b"")
    (newest.parent / f".{newest.name}.crc").unlink()


def flip(checkpoint: Path) -> None:
    newest = max((p for p in (checkpoint / "offsets").iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
    content = bytearray(newest.read_bytes())
    content[-3] ^= 1
    newest.write_bytes(content)


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


HARMS = [truncate, empty, flip, remove_offsets, roll_back, remove_metadata, remove_identity, garble_identity]


def test_damaged_checkpoint_is_refused(river: River, spark: SparkSession) -> None:
    """If this fails, damage to a checkpoint silently loses or repeats events."""
    chosen, place = run_first(river)
    prepared = river.prepare(chosen)
    endpoint = LogEndpoint(str(river.log))
    topics = endpoint.check(spark, ["s"])

    def take(root: Path) -> None:
        with open_checkpoint(spark, str(root), "p") as checkpoint:
            identity = adopt(checkpoint, prepared, topics)
            check_not_older(checkpoint, endpoint.last_epoch("p.out", f"p:{identity.id}"))

    take(place.parent)
    for harm in HARMS:
        copy = river.folder / harm.__name__
        shutil.copytree(place, copy / "p")
        harm(copy / "p")
        with pytest.raises(CheckpointDamaged, match="Try:"):
            take(copy)


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
