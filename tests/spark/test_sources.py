"""Sources of a transform in the streaming plan: added, reordered and removed, while the state and the other positions stay."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest

from services.core.broker.record import Record
from spark.jobs.checkpoint import CheckpointDamaged, Identity
from spark.jobs.start_checks import adopt_checkpoint
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


def run(pipeline: LogPipeline, sources: list[str], until: int) -> Path:
    """Returns the checkpoint's folder."""
    (pipeline.folder / "totals.py").write_text(TOTALS)
    pipeline.run(pipeline.pipe(columns="n INT", sources=sources, python="totals.py:totals", watermark="1m"), until)
    return pipeline.folder / "checkpoints" / "p"


def test_the_state_survives_other_sources(pipeline: LogPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a source that is added, moved or removed ends the query, or loses the state, or is read twice."""
    monkeypatch.setattr("spark.jobs.start_checks.changed_state", lambda *_: None)
    monkeypatch.setattr("spark.jobs.start_checks.names_sources", lambda _: True)  # no checkpoint gets names yet
    pipeline.send(amounts(0, 10, 1))
    run(pipeline, ["s"], 10)
    pipeline.send(amounts(10, 5, 100), "u")
    pipeline.send(amounts(20, 10, 1))
    folder = run(pipeline, ["u", "s"], 25)
    newest = max(int(path.name) for path in (folder / "offsets").iterdir() if path.name.isdigit())
    assert [line[:2] for line in (folder / "offsets" / str(newest)).read_text().splitlines()[2:]] == ["s:", "u:"]
    pipeline.send(amounts(40, 1, 1, minute=5.0))
    chosen = pipeline.pipe(columns="n INT", sources=["s"], python="totals.py:totals", watermark="1m")
    pipeline.start(chosen)
    wait_for(lambda: bool(pipeline.out) or bool(pipeline.problem), "the total")
    pipeline.stop()
    assert pipeline.problem is None, pipeline.problem
    assert [orjson.loads(record.value or b"") for record in pipeline.out] == [{"total": 10 + 500 + 10}]
    assert not pipeline.dead

    pipeline.start(pipeline.pipe(columns="n INT", sources=["s", "u"], python="totals.py:totals", watermark="1m"))
    wait_for(lambda: "u was a source before, and was removed" in (pipeline.problem or ""), "the refusal")


def adopted(names: list[str], topics: dict[str, str], sources: list[str], **identity: Any) -> Identity:
    """What becomes of a checkpoint with these sources in the plan of another start."""
    folder: Any = Folder()
    folder.batch, folder.names = 3, names
    former = prepared(HOUR)
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
    with pytest.raises(CheckpointDamaged, match="a was a source before, and was removed"):
        adopted(["b"], two, ["a", "b"], named=True, removed=["a"])
    assert adopted(["a", "b"], two, ["a", "b"], named=True, removed=["a"]).removed == [], "no batch ran without it"
