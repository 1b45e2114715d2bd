"""deduplicate_within: an id that came before does not come out again, and nothing else is ever left out."""

import shutil
from pathlib import Path

import orjson
import pytest
from pyspark.sql import SparkSession

from services.core.broker.record import Record
from services.core.event import REDRIVEN, read_id
from services.core.undelivered import dead_letter
from spark.jobs.checkpoint import ClockWentBack, open_checkpoint
from tests.spark.log_pipeline import NOW, LogPipeline, event


def test_duplicates_are_left_out(pipeline: LogPipeline) -> None:
    """If this fails, a client's retry reaches receivers twice, a late event is dropped, or a key's order breaks; or a dead letter
    that an operator sends again is dropped as repeated, and is lost."""
    day = 86_400_000
    late = [Record(b"key-1", b'{"delay":1}', NOW - n * day, (("ce_id", b"late-%d" % n),)) for n in range(1, 400)]
    first = [event(n, orjson.dumps({"delay": n})) for n in range(100)]
    foreign = [Record(b"k", b"{}", NOW, ()), Record(b"k", b"{}", NOW, ())]
    chosen = pipeline.pipe(
        columns="delay INT", sql="SELECT event, delay FROM s", deduplicate_within="1h", max_events=150
    )
    pipeline.send([*first, *first[:20]])
    pipeline.run(chosen, 100)
    pipeline.send([*first, *late, *foreign, *late[:5], event(100, orjson.dumps({"delay": 100}))])
    pipeline.run(chosen, 100 + 399 + 2 + 1)
    pipeline.send([event(100, orjson.dumps({"delay": 100}), **{REDRIVEN: b"p.dead:0:0"})])
    pipeline.run(chosen, 100 + 399 + 2 + 2)
    out = [read_id(r) for r in pipeline.out]
    assert out.count("id-100") == 2
    out.remove("id-100")
    assert sorted(out, key=str) == sorted([f"id-{n}" for n in range(101)] + [f"late-{n}" for n in range(1, 400)])
    assert [r.header(dead_letter.REASON) for r in pipeline.dead] == [b"bad_record"] * 2
    by_key: dict[bytes | None, list[str]] = {}
    for record in (one for one in pipeline.out if one.header(REDRIVEN) is None):
        by_key.setdefault(record.key, []).append(read_id(record) or "")
    sent = [read_id(r) or "" for r in [*first, *late, event(100, b"")]]
    assert all(found == sorted(found, key=sent.index) for found in by_key.values())


def test_clock_set_back_stops_before_anything_is_dropped(pipeline: LogPipeline, spark: SparkSession) -> None:
    """If this fails, Spark drops whole batches without a word after the machine's clock was set back."""
    pipeline.send([event(n, orjson.dumps({"delay": n})) for n in range(10)])
    pipeline.run(pipeline.pipe(columns="delay INT", sql="SELECT event, delay FROM s", deduplicate_within="1h"), 10)
    shutil.copytree(pipeline.folder / "checkpoints", pipeline.folder / "copy")
    path: Path = max((pipeline.folder / "copy" / "p" / "offsets").glob("[0-9]*"), key=lambda p: int(p.name))
    lines = path.read_text().splitlines()
    fields = orjson.loads(lines[1])
    with open_checkpoint(spark, str(pipeline.folder / "copy"), "p") as checkpoint:
        checkpoint.check_clock(int(path.name))
        lines[1] = orjson.dumps(fields | {"batchWatermarkMs": fields["batchTimestampMs"] + 5000}).decode()
        path.write_text("\n".join(lines))
        (path.parent / f".{path.name}.crc").unlink()
        with pytest.raises(ClockWentBack, match="waits 5 s"):
            checkpoint.check_clock(int(path.name))
