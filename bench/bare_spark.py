"""The floor of the transform: a bare Structured Streaming job, Kafka to Kafka, as Spark's guide has it.

`python -m bench.bare_spark SERVERS SOURCE TARGET CHECKPOINT INTERVAL_MS MAX_EVENTS` runs until it is ended. It has the SQL of
`bench/transform.py`, and passes key and headers on. Nothing is checked, counted or kept: a record that does not parse is lost.
Spark has its defaults but for the same master, heap, trigger and size of a batch as ours.
"""

import os
import sys

from pyspark.sql import SparkSession

from services.core.jvm.jars import SPARK_KAFKA, jar_set
from services.core.jvm.java import java_env

COLUMNS = "id STRING, user STRING, time BIGINT, price DOUBLE, note STRING"


def main(servers: str, source: str, target: str, checkpoint: str, interval_ms: str, max_events: str) -> None:
    """Run until the process is ended."""
    os.environ.update(java_env())
    builder = SparkSession.builder.master("local[2]").appName("bare").config("spark.driver.memory", "1g")
    builder = builder.config("spark.ui.enabled", "false").config("spark.driver.host", "127.0.0.1")
    builder = builder.config("spark.jars", ",".join(str(path) for path in jar_set(SPARK_KAFKA)))
    builder = builder.config("spark.sql.shuffle.partitions", "2")
    session = builder.getOrCreate()
    options = {"kafka.bootstrap.servers": servers, "subscribe": source, "startingOffsets": "earliest"}
    options |= {"includeHeaders": "true", "maxOffsetsPerTrigger": max_events}
    raw = session.readStream.format("kafka").options(**options).load()
    parsed = raw.selectExpr("key", "headers", f"from_json(CAST(value AS STRING), '{COLUMNS}') AS row")
    parsed.selectExpr("key", "headers", "row.*").createOrReplaceTempView("events")
    out = session.sql("SELECT key, to_json(struct(id, user, time, note)) AS value, headers FROM events WHERE price > 0")
    sink = {"kafka.bootstrap.servers": servers, "topic": target, "checkpointLocation": checkpoint}
    query = out.writeStream.format("kafka").options(**sink).trigger(processingTime=f"{interval_ms} milliseconds")
    query.start().awaitTermination()


if __name__ == "__main__":
    main(*sys.argv[1:])
