"""The origins that Spark gathers: the same as from records that left Spark, whatever the headers are."""

import random
from collections.abc import Sequence

import pyarrow as pa
import pytest
from pyspark.sql import Observation, SparkSession
from pyspark.sql import functions as f

from services.core.broker.record import Batch, Record
from services.core.event import ORIGIN
from services.core.ledger.minute import MINUTE_MS
from spark.batch_report import Gathered, gather_origins, minute_at, origins_of, read_origins
from spark.records import RAW, RAW_SCHEMA, to_arrow

ARRIVAL = 1_700_000_000_000
_PIECES = (
    "",
    ":",
    "a",
    "run7",
    "x" * 64,
    "x" * 65,
    "A",
    "0",
    "00",
    "7",
    "\u0663",
    " ",
    "-1",
    "1_0",
    "4294967296",
    "\n",
)


def random_origin(rng: random.Random) -> bytes:
    """Mostly one as ingest writes it, often with an odd place, sometimes anything."""
    if rng.random() < 0.6:
        number = rng.choice(
            (rng.randrange(70_000), rng.randrange(1 << 31), rng.randrange(1 << 34), 1 << 31, (1 << 31) - 1)
        )
        return f"{rng.choice(('a', 'run7', 'x' * 64))}:{rng.choice(('0', '3', '007', '999999999'))}:{number}".encode()
    if rng.random() < 0.1:
        return rng.randbytes(rng.randrange(12))
    return ":".join(rng.choice(_PIECES) for _ in range(rng.randrange(5))).encode()


def random_headers(rng: random.Random) -> tuple[tuple[str, bytes], ...]:
    """Ours is anywhere, missing, there twice, or has a name that is nearly the same."""
    names = [
        "ce_id",
        "penstock_arrival",
        *rng.choice(([ORIGIN], [ORIGIN], [ORIGIN], [ORIGIN, ORIGIN], [], [ORIGIN + "s"])),
    ]
    if rng.random() < 0.3:
        rng.shuffle(names)
    return tuple((name, random_origin(rng)) for name in names)


@pytest.fixture(scope="module")
def records() -> Sequence[Record]:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    rng = random.Random(seed)
    times = [ARRIVAL + rng.choice((0, rng.randrange(-5 * MINUTE_MS, 5 * MINUTE_MS), 900)) for _ in range(6000)]
    found = [Record(None, b"", time, random_headers(rng)) for time in times]
    return [*found, Record(None, b"", 1, ())]


@pytest.mark.parametrize("arrival", [None, ARRIVAL])
def test_spark_gathers_what_the_headers_say(
    spark: SparkSession, records: Sequence[Record], arrival: int | None
) -> None:
    """If this fails, the ledger counts other events of a batch than the batch has: a loss is hidden, or invented."""
    table = pa.Table.from_batches([to_arrow(Batch("t", 0, range(len(records)), records), RAW_SCHEMA)])
    frame = spark.createDataFrame(table, RAW)
    seen, minute = Observation(), None if arrival is None else minute_at(f.col("timestamp"), arrival)
    frame.repartition(4).observe(seen, gather_origins(minute=minute).alias("origins")).write.format("noop").mode(
        "overwrite"
    ).save()
    expected = origins_of(records, arrival=arrival)
    assert read_origins(seen.get["origins"]) == expected
    assert expected.valid > 1000
    assert expected.malformed > 1000
    some = f.col("timestamp") < f.timestamp_millis(f.lit(ARRIVAL))
    row = frame.agg(gather_origins(some, minute)).first()
    assert row is not None
    assert read_origins(row[0]) == origins_of([each for each in records if each.timestamp < ARRIVAL], arrival=arrival)


def test_nothing_is_gathered_of_nothing(spark: SparkSession) -> None:
    """If this fails, an empty batch ends a query."""
    empty = spark.createDataFrame([], RAW)
    row = empty.agg(gather_origins()).first()
    assert row is not None
    assert read_origins(row[0]) == Gathered({})
    assert read_origins("") == Gathered({})


@pytest.mark.parametrize(("every", "most"), [(1, 200), (7, 500_000)])
def test_a_run_is_a_short_text(spark: SparkSession, every: int, most: int) -> None:
    """If this fails, what the driver gets of a batch grows with its events: with consecutive ones at all, and one in seven by
    more than 2.5 bytes each."""
    origin = f.concat(f.lit("run:0:"), (f.col("id") * every).cast("string")).cast("binary")
    headers = f.array(f.struct(f.lit(ORIGIN).alias("key"), origin.alias("value"))).alias("headers")
    row = spark.range(200_000, numPartitions=2).select(headers).agg(gather_origins()).first()
    assert row is not None
    assert len(row[0]) < most
    (numbers,) = read_origins(row[0]).all.values()
    assert (len(numbers), numbers.max()) == (200_000, 199_999 * every)
