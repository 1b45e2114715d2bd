"""Sources of a transform in the streaming plan: added, reordered and removed, while the state and the other positions stay."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from pyspark.sql import SparkSession

from services.core.broker.record import Record
from spark.jobs.checkpoint import CheckpointDamaged, Identity
from spark.jobs.start_checks import adopt_checkpoint
from spark.session import own_session
from spark.settings import SelectedPipes
from tests.spark.log_pipeline import NOW, LogPipeline, event, wait_for
from tests.spark.stored_marks import StoredMarks
from tests.spark.test_state import HOUR, Folder, prepared

START = NOW - NOW % 60_000
TOTALS = """\
from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as f


def totals(*frames: DataFrame) -> DataFrame:
    every = reduce(DataFrame.union, [frame.select("event_time", "n") for frame in frames])
    total = every.groupBy(f.window("event_time", "1 minute")).agg(f.sum("n").alias("total"))
    return total.select(f.date_format("window.start", "HH:mm").alias("id"), "total")
"""


def amounts(first: int, count: int, n: int, minute: float = 0.0) -> list[Record]:
    at = START + round(minute * 60_000)
    rows = [event(first + number, orjson.dumps({"n": n})) for number in range(count)]
    return [msgspec.structs.replace(row, timestamp=at) for row in rows]


def totals(pipeline: LogPipeline, sources: list[str]) -> SelectedPipes:
    (pipeline.folder / "totals.py").write_text(TOTALS)
    return pipeline.pipe(columns="n INT", sources=sources, python="totals.py:totals", watermark="1m", interval="50ms")


def newest(folder: Path) -> Path:
    return max((path for path in folder.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))


def more_parts(session: SparkSession) -> SparkSession:
    """A session as on a machine with more cores."""
    own = own_session(session)
    own.conf.set("spark.sql.shuffle.partitions", "7")
    return own


def test_the_state_survives_other_sources(pipeline: LogPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a source that is added, moved or removed ends the query, or loses the state, or is read twice; or a query
    never starts again after a batch that was planned and not done, or after a change of the machine's cores."""
    pipeline.start(totals(pipeline, ["s"]))
    for first in (0, 10):
        pipeline.send(amounts(first, 10, 1))
        wait_for(lambda first=first: pipeline.read >= first + 10, "both batches")  # type: ignore[misc]
    pipeline.stop()
    folder = pipeline.folder / "checkpoints" / "p"
    done = newest(folder / "commits")
    assert int(done.name) >= 1
    done.unlink()  # as if the process had ended in the batch

    monkeypatch.setattr("spark.jobs.job.own_session", more_parts)
    pipeline.send(amounts(20, 5, 100), "u")
    pipeline.send(amounts(30, 10, 1))
    pipeline.batches.clear()
    pipeline.run(totals(pipeline, ["u", "s"]), 15)
    lines = newest(folder / "offsets").read_text().splitlines()
    assert [line[:2] for line in lines[2:]] == ["s:", "u:"]
    pipeline.send(amounts(50, 1, 1, minute=5.0))
    pipeline.start(totals(pipeline, ["s"]))
    wait_for(lambda: bool(pipeline.out) or bool(pipeline.problem), "the total")
    pipeline.stop()
    assert pipeline.problem is None, pipeline.problem
    assert [orjson.loads(record.value or b"") for record in pipeline.out] == [{"total": 20 + 500 + 10}]
    assert not pipeline.dead

    pipeline.start(totals(pipeline, ["s", "u"]))
    wait_for(lambda: "u was a source before, and was removed" in (pipeline.problem or ""), "the refusal")


def adopted(
    names: list[str], topics: dict[str, str], sources: list[str], *, done: int = 3, live: bool = False, **identity: Any
) -> Identity:
    """What becomes of a checkpoint with these sources in the plan of another start. done: of its batches up to 3. live: it is of
    a transform in real-time mode, which Spark chose."""
    folder: Any = Folder()
    folder.batch, folder.names = 3, names
    folder.has_batch = lambda _, batch: batch <= done
    former = replace(prepared(HOUR, row_by_row=live), real_time=live)
    folder.identity = Identity(
        id="i", pipe="p", topics=topics, transform="", kind="in plan", ran=True, **{"state": former.state} | identity
    )
    now = replace(former, views=dict.fromkeys(sources, former.views["s"]))
    return adopt_checkpoint(folder, now, dict.fromkeys(sources, "t"), StoredMarks())


def test_which_sources_fit_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, Spark gives the offsets of a source to another one, or reads one again; or a checkpoint of an earlier
    version is refused."""
    monkeypatch.setattr("spark.jobs.start_checks.changed_state", lambda *_: None)
    two = {"a": "t", "b": "t"}
    assert not adopted(["", ""], two, ["a", "b"]).named, "an earlier version made it"
    for names, sources in ((["", ""], ["b", "a"]), (["", ""], ["a"]), ([""], ["a", "b"]), (["", ""], ["a", "b", "c"])):
        with pytest.raises(CheckpointDamaged, match="it knows its sources by their order, and they changed"):
            adopted(names, two, sources)
    assert adopted([""], {"a": "t", "b": "t"}, ["a"]).topics == two, "an attempt with b failed before its first batch"
    assert adopted(["a", "b"], two, ["b", "c"], named=True).removed == ["a"]
    with pytest.raises(CheckpointDamaged, match="batch 3 is planned and not done, and has events of a,"):
        adopted(["a", "b"], two, ["b", "c"], done=2, named=True)
    assert adopted(["a", "b"], two, ["a", "b", "c"], done=2, named=True).removed == []
    assert adopted(["a", "b"], two, ["a"], live=True, done=2, named=True).removed == ["b"]
    with pytest.raises(CheckpointDamaged, match="a was a source before, and was removed"):
        adopted(["b"], two, ["a", "b"], named=True, removed=["a"])
    assert adopted(["a", "b"], two, ["a", "b"], named=True, removed=["a"]).removed == [], "no batch ran without it"
