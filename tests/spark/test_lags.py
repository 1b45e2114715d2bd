"""The lags that a transform reports: percentiles within 1 % of the exact ones, whatever the distribution."""

import random
import time
from collections import Counter

import pytest
from pyspark.sql import Observation, SparkSession
from pyspark.sql import functions as f

from services.core.broker.record import Record
from services.core.event import ID
from services.core.lag import nearest_rank
from spark.batch_report import count_by_lag, count_by_minute, read_lags, read_minutes
from tests.spark.log_pipeline import LogPipeline, merged_lags

SHARES = (0.5, 0.95, 0.99)
DAY_MS = 86_400_000


def hard(random_lag: random.Random, count: int) -> list[int]:
    """Two humps with nothing between them, where the 95th percentile is the first of the second, which has a heavy tail."""
    late = count // 20 + 1
    near = [round(random_lag.uniform(10, 12) * DAY_MS) for _ in range(count - late)]
    return near + [round((100 + 30 * random_lag.paretovariate(1.1)) * DAY_MS) for _ in range(late)]


def test_percentiles_are_within_one_percent(pipeline: LogPipeline) -> None:
    """If this fails, the P95 that a transform shows is that of other events: it was off by the whole gap between two humps."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    lags = hard(random.Random(seed), 2003)
    now = time.time_ns() // 1_000_000
    shuffled = random.Random(seed).sample(lags, len(lags))
    pipeline.send(Record(b"k%d" % (n % 97), b"{}", now - lag, ((ID, b"%d" % n),)) for n, lag in enumerate(shuffled))
    pipeline.run(pipeline.pipe(sql="SELECT event, value FROM s", max_events=500), len(lags))
    assert len({report.read for report in pipeline.batches if report.read}) > 1, "batches of one size only"
    exact = [sorted(lags)[nearest_rank(share, len(lags)) - 1] for share in SHARES]
    for kind in ("lag_in", "lag_out"):
        merged = merged_lags(pipeline.reports, kind)
        assert merged.count == len(lags)
        assert merged.quantiles(SHARES) == [pytest.approx(value, rel=0.01) for value in exact]


def test_every_event_is_counted_with_its_lag(spark: SparkSession) -> None:
    """If this fails, what Spark counts of a batch is not what came in: short lags, clocks that are ahead, or very many lags."""
    lags = [*range(-150, 190), *(round(1.003**n) for n in range(1, 8_500)), 0, 0, 0]
    seen = Observation()
    frame = spark.createDataFrame([(lag,) for lag in lags], "lag LONG").observe(
        seen, count_by_lag(f.col("lag")).alias("lags")
    )
    frame.write.format("noop").mode("overwrite").save()
    found = read_lags(seen.get["lags"])
    assert found.total() == len(lags)
    near = Counter(lag for lag in lags if abs(lag) < 190)
    assert {lag: count for lag, count in found.items() if abs(lag) < 190} == near
    for lag, exact in zip(sorted(found.elements()), sorted(lags), strict=True):
        assert abs(lag - exact) <= 0.0026 * abs(exact) + 0.5
    assert read_lags(seen.get["lags"], later_ms=7).keys() == {lag + 7 for lag in found}
    assert not read_lags("")


def test_lags_of_two_minutes(spark: SparkSession) -> None:
    """If this fails, lags of real-time mode count in the minute in which their batch ended, or in another one."""
    seen, end = Observation(), 29_000_001
    rows = [
        (7, end * 60_000 - 1),
        (8, end * 60_000),
        (9, end * 60_000 + 14_999),
        (190, end * 60_000 - 15_000),
        (None, None),
    ]
    counted = count_by_minute(f.col("lag"), f.col("at"), "lags")
    frame = spark.createDataFrame(rows, "lag LONG, at LONG").observe(seen, *counted)
    frame.write.format("noop").mode("overwrite").save()
    assert read_minutes(seen.get, "lags", end) == (Counter([8, 9]), Counter([7, 190]))
    assert read_minutes(seen.get, "lags", end - 1)[0] == Counter([7, 190])
