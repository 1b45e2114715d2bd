"""A Python transform: a function that gets one DataFrame per source stream and returns one.

The frame has the stream's declared columns, `value` (the payload as text) and `event`, the event's identity. What is
returned keeps `event` as it was and has the columns of the new payload.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f


def add_speed(flights: DataFrame) -> DataFrame:
    """The average speed of each flight that was in the air."""
    flown = flights.where(f.col("air_time") > 0)
    return flown.select(
        "event", "id", "tailnum", f.round(f.col("distance") * 60 / f.col("air_time"), 1).alias("miles_an_hour")
    )
