"""What a batch gives, collected at the driver: bounded, since neither Java nor Python survives without memory.

A task counts its rows and fails beyond MAX_ROWS; Spark adds up the bytes (`spark.driver.maxResultSize`). Both are failures like
others: the batch is then done in parts.
"""

from typing import Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

MAX_ROWS = 500_000
"""Of one task. Twenty-five rows out of each event of a batch of 20,000 that one task reads."""
_TOO_MANY = f"more than {MAX_ROWS} rows come out of one task"
_TOO_MUCH = (_TOO_MANY, "spark.driver.maxResultSize", "SparkOutOfMemoryError", "UNABLE_TO_ACQUIRE_MEMORY")


def bounded(frame: DataFrame) -> DataFrame:
    """The frame (columns OUT), such that executing it raises when it has too many rows."""
    row = f.monotonically_increasing_id().bitwiseAND((1 << 33) - 1)
    value = f.when(row < MAX_ROWS, f.col("value")).otherwise(f.raise_error(f.lit(_TOO_MANY)).cast("binary"))
    return frame.withColumn("value", value)


def collect(frame: DataFrame) -> Any:
    """An Arrow table of the frame (columns OUT). Raises what executing it raises."""
    return bounded(frame).toArrow()


def is_too_much(error: BaseException) -> bool:
    """Whether this failure says that the output was too large, rather than wrong."""
    return any(text in str(error) for text in _TOO_MUCH)
