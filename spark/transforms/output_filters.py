"""Several outputs of one transform: their filters as expressions over the transform's result.

All outputs share one topic. A header of each record names the outputs that it is in (`event.OUTPUTS`), and expel reads it. So a
result is computed and written once, however many outputs it is in, and the order of keys is that of one topic.
"""

from collections.abc import Mapping
from functools import reduce

from pyspark.sql import Column
from pyspark.sql import functions as f

from services.core.event import OUTPUTS
from services.core.pipe_file.pipes import Pipe
from services.core.pipe_file.transform import Output


class OutputFilters:
    """Of one transform. taken: whether a row is written at all; None: every row is."""

    def __init__(self, outputs: Mapping[str, Output], *, keep_all: bool) -> None:
        """keep_all: some destination gets every row."""
        filters = {name: None if output.where is None else f.expr(output.where) for name, output in outputs.items()}
        names = [f.lit(name) if where is None else f.when(where, f.lit(name)) for name, where in filters.items()]
        self.header = f.struct(
            f.lit(OUTPUTS).alias("key"),
            f.concat_ws(",", *names).cast("binary").alias("value"),  # leaves out the names that are null
        )
        conditions = [where for where in filters.values() if where is not None]
        self.taken: Column | None = None
        if not keep_all and len(conditions) == len(filters):
            self.taken = reduce(Column.__or__, [f.coalesce(where, f.lit(False)) for where in conditions])

    @classmethod
    def of(cls, pipe: Pipe) -> "OutputFilters | None":
        """None when the transform has one output only, without a filter."""
        if pipe.transform is None or not pipe.transform.outputs:
            return None
        return cls(pipe.transform.outputs, keep_all=any(one.output is None for one in pipe.destinations))
