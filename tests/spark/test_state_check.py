"""`penstock check` beside a real Spark of its own: a changed transform is compared with the state that the former one left."""

import asyncio
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from services.core.broker.connect import open_broker
from services.core.broker.producer import Producer
from services.core.control.transform_marks import write_transform_mark
from services.core.pipe_file.pipes import load_pipes
from services.core.yaml_source import BadConfiguration
from services.fleet.pipes.topics import check_changes, prepare
from spark.settings import TransformSettings
from spark.settings import load_pipes as select_pipes
from spark.transforms.preparation import prepare_pipes

PIPE = """  {name}:
    sources: [s]
    transform:
      watermark: 1m
      sql: |
        SELECT concat(carrier, window.start) AS id, count(*) AS n FROM s GROUP BY carrier, window(event_time, '{length}')
        -- {comment}
    destinations: [{{name: d, webhook: {{url: "https://example.com/"}}}}]
"""


def write(path: Path, **pipes: tuple[str, str]) -> None:
    """pipes: the length of the window, and a comment."""
    text = "version: 1\nstreams: {s: {columns: 'carrier STRING'}}\npipes:\n"
    path.write_text(
        text + "".join(PIPE.format(name=name, length=one[0], comment=one[1]) for name, one in pipes.items())
    )


def leave_state(url: str, path: Path, spark: SparkSession) -> None:
    """As transforms that have stored a batch."""
    asyncio.run(prepare(url, load_pipes(path), path))
    found = prepare_pipes(spark, select_pipes(TransformSettings(pipes=path)), max_bytes=1_000_000)

    async def write_marks() -> None:
        async with open_broker(url) as broker, Producer(broker.appender) as producer:
            for one in found:
                await write_transform_mark(producer, one.pipe, "begun", "1", "transform", one.plan)

    asyncio.run(write_marks())


def test_only_the_changed_state_is_refused(tmp_path: Path, spark: SparkSession) -> None:
    """Broken: a fleet starts whose transform service then refuses a pipe; or a comment stops a fleet."""
    path, url = tmp_path / "pipes.yaml", f"log://{tmp_path}/log"
    write(path, same=("1 minute", "before"), other=("1 minute", "before"))
    leave_state(url, path, spark)
    write(path, same=("1 minute", "after"), other=("5 minutes", "before"))
    with pytest.raises(BadConfiguration) as caught:
        asyncio.run(check_changes(url, load_pipes(path), path, None))
    (problem,) = caught.value.problems
    assert (problem.key, problem.where) == ("pipes.other.transform.sql", f"{path}:16")
    assert "the key of the aggregation was carrier and window(1m), now carrier and window(5m)." in problem.message
    assert "penstock group reset other --to-earliest" in problem.message
