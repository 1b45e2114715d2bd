"""Events whose id was seen before are left out of a stream.

Time is the moment of processing: each batch's own time, never the events'. A watermark over it can therefore never pass
an event that comes late; it only forgets ids. (`Checkpoint.check_clock` stops the one exception, a clock set back.)
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from services.core.event import ID
from spark.shapes import RAW_NAMES
from spark.view import header

_SEEN = "_penstock_seen"
_KEY = "_penstock_key"


def drop_duplicates(raw: DataFrame, within: float) -> DataFrame:
    """A raw stream without the records whose stream and id came within so many seconds. Records without id stay."""
    own_key = f.concat_ws("/", "topic", "partition", "offset")
    key = f.when(header(ID).isNull(), own_key).otherwise(f.concat_ws(":", f.col("topic"), f.base64(header(ID))))
    marked = raw.withColumn(_KEY, key).withColumn(_SEEN, f.current_timestamp())
    kept = marked.withWatermark(_SEEN, f"{round(within * 1000)} milliseconds").dropDuplicatesWithinWatermark([_KEY])
    return kept.select(*RAW_NAMES)
