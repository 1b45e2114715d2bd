"""Everything about a pipe's transform that can be decided before a query starts; mistakes are named in the pipe file."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

from services.core.pipes import PipeFile, Transform, pipe_version
from services.core.yaml_source import BadConfiguration, Document
from spark.errors import shorten
from spark.numbering import Numbering
from spark.out import BadTransform, OutShape
from spark.pipe_file import Chosen
from spark.shapes import EVENT, EVENT_TIME, RAW
from spark.transforms.definition import Definition, load_definition
from spark.transforms.plan_check import SOURCE_ALIAS, dropping_parts, is_stateless, nondeterministic_parts
from spark.view import SourceView


@dataclass(frozen=True, slots=True)
class Prepared:
    """A pipe's transform, ready to run. views: by source stream, in the pipe's order.

    row_by_row: each micro-batch may be computed by itself (see `plan_check.is_stateless`). version: of the pipe's definition.
    """

    pipe: str
    transform: Transform
    views: Mapping[str, SourceView]
    definition: Definition
    out: OutShape
    row_by_row: bool
    version: str = ""

    @property
    def state(self) -> str:
        """Stands for what its state over batches means; empty when it keeps none but the ids of `deduplicate_within`."""
        if self.row_by_row:
            return ""
        columns = [
            (name, None if view.columns is None else view.columns.simpleString()) for name, view in self.views.items()
        ]
        return hashlib.sha256(repr((self.definition.source, columns)).encode()).hexdigest()

    @property
    def per_batch(self) -> bool:
        """Whether it runs on each micro-batch by itself; else it is part of the streaming plan."""
        return self.row_by_row and self.transform.mode == "micro-batch"

    @property
    def deduplicates(self) -> bool:
        """Whether events seen before are left out."""
        return self.transform.deduplicate_within is not None

    def watermarked(self, frame: DataFrame) -> DataFrame:
        """A streaming source view with the watermark that the pipe asks for; as it is without one."""
        delay = self.transform.watermark
        return frame if delay is None else frame.withWatermark(EVENT_TIME, f"{round(delay * 1000)} milliseconds")

    def apply(
        self, frames: Mapping[str, DataFrame], session: SparkSession, numbering: Numbering | None = None
    ) -> DataFrame:
        """The output records for these source views. Lazy. numbering: as in `OutShape.apply`."""
        return self.out.apply(self.definition.apply(session, frames), numbering)


def of_stream(prepared: Prepared, raw: DataFrame, stream: str) -> DataFrame:
    """The part of a batch of all sources that is one source's."""
    return raw if len(prepared.views) == 1 else raw.where(f.col("topic") == stream)


def prepare_pipes(session: SparkSession, chosen: Chosen, *, max_bytes: int) -> list[Prepared]:
    """Prepare the chosen pipes. Blocking. Raises BadConfiguration with every mistake at once."""
    found, problems = [], []
    for name in chosen.names:
        try:
            found.append(_prepare(session, chosen.document, chosen.file, name, max_bytes))
        except BadConfiguration as error:
            problems += error.problems
    if problems:
        raise BadConfiguration(problems)
    return found


def _prepare(session: SparkSession, document: Document, file: PipeFile, name: str, max_bytes: int) -> Prepared:
    pipe = file.pipes[name]
    assert pipe.transform is not None
    views, timed, stamped = {}, pipe.transform.watermark is not None, pipe.transform.mode == "real-time"
    for stream in pipe.sources:
        try:
            columns = _parse_columns(file.streams[stream].columns, timed=timed)
            views[stream] = SourceView(columns, timed=timed, stamped=stamped)
        except (PySparkException, BadTransform) as error:
            raise BadConfiguration([document.problem(("streams", stream, "columns"), shorten(error))]) from error
    key = ("pipes", name, "transform", "sql" if pipe.transform.sql is not None else "python")
    try:
        definition = load_definition(pipe.transform, document.path.parent)
        definition.check(session)
        empty = session.createDataFrame([], RAW).alias(SOURCE_ALIAS)
        result = definition.apply(session, {stream: view.good(view.judge(empty)) for stream, view in views.items()})
        declared = [column for view in views.values() if view.columns is not None for column in view.columns.names]
        out = OutShape(result.schema, declared=declared, max_bytes=max_bytes, stamped=stamped)
        _ = out.apply(result).schema
        if parts := nondeterministic_parts(result):
            raise BadTransform(
                f"gives another result when a batch is computed again after a crash: {', '.join(parts)}. "
                "Try: deriving ids and values from the event"
            )
        if parts := dropping_parts(result):
            raise BadTransform(
                f"would leave out events by chance: {', '.join(parts)}. Try: WHERE, or deduplicate_within for duplicates"
            )
        row_by_row = is_stateless(result)
        if pipe.transform.mode == "real-time" and not row_by_row:
            raise BadTransform("is not a stateless query, which real-time mode needs. Try: mode: micro-batch")
    except (PySparkException, BadTransform) as error:
        raise BadConfiguration([document.problem(key, shorten(error))]) from error
    except Exception as error:  # the operator's own code: whatever it raises is a mistake in that file
        raise BadConfiguration([document.problem(key, f"{type(error).__name__}: {shorten(error)}")]) from error
    return Prepared(name, pipe.transform, views, definition, out, row_by_row, pipe_version(pipe))


def _parse_columns(ddl: str | None, *, timed: bool) -> StructType | None:
    if ddl is None:
        return None
    columns = StructType.fromDDL(ddl)
    assert isinstance(columns, StructType)
    names = [name.lower() for name in columns.names]
    for name in names:
        if name == EVENT or (timed and name == EVENT_TIME) or name.startswith("_penstock"):
            raise BadTransform(
                f"the column name {name!r} is taken. Try: another name, read by a transform from `value`"
            )
        if names.count(name) > 1:
            raise BadTransform(f"the column {name!r} stands twice (names are the same in upper and lower case)")
    return columns
