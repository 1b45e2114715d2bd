"""A pipe's transform, checked before a query starts; mistakes are reported with their line in the pipe file."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import BooleanType, StructField, StructType

from services.core.pipe_file.columns import find_bad_names, find_column_mistakes
from services.core.pipe_file.pipes import PipeFile, pipe_version
from services.core.pipe_file.state_plan import USER_STATE, StatePlan, text_digest
from services.core.pipe_file.transform import Output, Transform
from services.core.yaml_source import BadConfiguration
from spark.errors import shorten
from spark.java import analyzed_plan
from spark.records import EVENT_TIME, RAW
from spark.settings import SelectedPipes
from spark.tables import ReferenceTable, has_map
from spark.transforms.analysis import (
    SOURCE_ALIAS,
    check_repeatable,
    nondeterministic_parts,
    parts_over_events,
    shows_all_of_event,
    why_not_real_time,
)
from spark.transforms.definition import Definition, load_definition
from spark.transforms.output import BadTransform, OriginNumbering, OutShape
from spark.transforms.output_filters import OutputFilters
from spark.transforms.plan_tree import walk
from spark.transforms.state_plan import describe_state
from spark.transforms.user_state import check_user_states, user_states
from spark.transforms.view import SourceView


@dataclass(frozen=True, slots=True)
class Prepared:
    """A pipe's transform, ready to run. views: by source stream, in the pipe's order.

    row_by_row: each micro-batch may be computed by itself (`parts_over_events`). real_time: it runs in Spark's real-time mode;
    what the pipe file asks for is `transform.mode`. version: of the pipe's definition. obstacle: why Spark cannot run it in
    real-time mode, as the end of a sentence; empty: nothing is known. why_not: the code of the reason against real-time mode,
    when the pipe file leaves the mode open. fallback: the same transform in micro-batches, where it may go on so. partitions: of
    its sources in real-time mode, so many at most have a task slot each; 0: not known. shows_event: a function gets the whole
    `event`, and may show that it has one more field in real-time mode. in_plan: in micro-batches, and part of the streaming plan
    though it is row by row (`jobs.modes.prefer_plan`). plan: what it keeps over several events; None when it keeps nothing, or
    cannot run on a stream. tables: the reference data that it reads, by name. idle_batches: whether it may have work to do when
    there are no new events.
    """

    pipe: str
    transform: Transform
    views: Mapping[str, SourceView]
    definition: Definition
    out: OutShape
    row_by_row: bool
    real_time: bool = False
    version: str = ""
    obstacle: str = ""
    why_not: str = ""
    fallback: "Prepared | None" = None
    partitions: int = 0
    plan: StatePlan | None = None
    tables: Mapping[str, ReferenceTable] = field(default_factory=dict)
    in_plan: bool = False
    idle_batches: bool = True
    shows_event: bool = False

    @property
    def state(self) -> str:
        """Identifies the meaning of its state over batches; empty when it keeps none but the ids of `deduplicate_within`."""
        if self.row_by_row:
            return ""
        columns = [
            (name, None if view.columns is None else view.columns.simpleString()) for name, view in self.views.items()
        ]
        tables = [(name, table.columns.simpleString()) for name, table in self.tables.items()]
        parts = (
            self.definition.source,
            columns,
            *([tables] if tables else []),
        )  # as in earlier versions without tables
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    @property
    def columns(self) -> dict[str, str | None]:
        """The columns of each source, by which its records are checked, as JSON of Spark's types; None: any text."""
        return {name: None if view.columns is None else view.columns.json() for name, view in self.views.items()}

    @property
    def per_batch(self) -> bool:
        """Whether it runs on each micro-batch by itself; else it is part of the streaming plan."""
        return self.row_by_row and not self.real_time and not self.in_plan

    @property
    def deduplicates(self) -> bool:
        """Whether repeated events are dropped."""
        return self.transform.deduplicate_within is not None

    def watermarked(self, frame: DataFrame) -> DataFrame:
        """A streaming source view with the watermark that the pipe asks for; as it is without one."""
        delay = self.transform.watermark
        return frame if delay is None else frame.withWatermark(EVENT_TIME, f"{round(delay * 1000)} milliseconds")

    def views_of(self, raw: DataFrame) -> dict[str, DataFrame]:
        """The source views of a batch of raw records."""
        return {stream: view.good(view.check(of_stream(self, raw, stream))) for stream, view in self.views.items()}

    def apply(
        self, frames: Mapping[str, DataFrame], session: SparkSession, numbering: OriginNumbering | None = None
    ) -> DataFrame:
        """The output records for these source views, with the present content of its tables. Lazy.

        numbering: as in `OutShape.apply`. Raises TableUnavailable.
        """
        tables = {name: table.frame(session) for name, table in self.tables.items()}
        return self.out.apply(self.definition.apply(session, {**frames, **tables}), numbering)

    def analyse(self, frames: Mapping[str, DataFrame], session: SparkSession) -> DataFrame:
        """As `apply`, with tables that have no content: it may be analysed, and does not run."""
        tables = {name: table.unread(session) for name, table in self.tables.items()}
        return self.out.apply(self.definition.apply(session, {**frames, **tables}))


def of_stream(prepared: Prepared, raw: DataFrame, stream: str) -> DataFrame:
    """The records of one source in a batch of all sources."""
    return raw if len(prepared.views) == 1 else raw.where(f.col("topic") == stream)


def prepare_pipes(session: SparkSession, selected: SelectedPipes, *, max_bytes: int) -> list[Prepared]:
    """Prepare the selected pipes. Blocking. Raises BadConfiguration with every mistake at once."""
    found, problems = [], []
    tables = _prepare_tables(selected)
    for name in selected.names:
        try:
            found.append(prepare_pipe(session, selected, name, max_bytes=max_bytes, known=tables))
        except BadConfiguration as error:
            problems += error.problems
    if problems:
        raise BadConfiguration(problems)
    return found


def _prepare_tables(selected: SelectedPipes) -> dict[str, ReferenceTable]:
    """The tables that these pipes read. None is read yet. Raises BadConfiguration with every mistake."""
    found, problems, folder = {}, [], selected.document.path.parent
    for name, definition in selected.tables().items():
        try:
            columns = _parse_columns(definition.columns, timed=False)
            assert columns is not None
            if has_map(columns):
                raise BadTransform("a table has no columns of maps. Try: ARRAY<STRUCT<key: …, value: …>>")
            found[name] = ReferenceTable(name, definition, columns, folder)
        except (PySparkException, BadTransform) as error:
            problems.append(selected.document.problem(("tables", name, "columns"), shorten(error)))
    if problems:
        raise BadConfiguration(problems)
    return found


def prepare_pipe(
    session: SparkSession,
    selected: SelectedPipes,
    name: str,
    *,
    max_bytes: int,
    real_time: bool | None = None,
    known: Mapping[str, ReferenceTable] | None = None,
) -> Prepared:
    """real_time: whether in this mode; None: as the pipe file says, `auto` in micro-batches. known: tables that pipes share.

    Blocking. Raises BadConfiguration with every mistake.
    """
    document, file, pipe = selected.document, selected.file, selected.file.pipes[name]
    known = _prepare_tables(selected) if known is None else known
    assert pipe.transform is not None
    views, timed = {}, pipe.transform.watermark is not None
    real_time = pipe.transform.mode == "real-time" if real_time is None else real_time
    for stream in pipe.sources:
        try:
            columns = _parse_columns(file.streams[stream].columns, timed=timed)
            views[stream] = SourceView(columns, timed=timed, stamped=real_time)
        except (PySparkException, BadTransform) as error:
            raise BadConfiguration([document.problem(("streams", stream, "columns"), shorten(error))]) from error
    key = ("pipes", name, "transform", "sql" if pipe.transform.sql is not None else "python")
    try:
        definition = load_definition(session, pipe.transform, document.path.parent)
        empty = session.createDataFrame([], RAW).alias(SOURCE_ALIAS)
        tables = {table: known[table] for table in pipe.transform.tables}
        frames = {stream: view.good(view.check(empty)) for stream, view in views.items()}
        result = definition.apply(session, {**frames, **{each: one.empty(session) for each, one in tables.items()}})
        if mistakes := _find_filter_mistakes(session, result.schema, pipe.transform.outputs):
            place = ("pipes", name, "transform", "outputs")
            raise BadConfiguration(
                [document.problem((*place, output, "where"), reason) for output, reason in mistakes.items()]
            )
        declared = [column for view in views.values() if view.columns is not None for column in view.columns.names]
        decimals_as_text = pipe.transform.decimals == "string"
        out = OutShape(
            result.schema,
            declared=declared,
            max_bytes=max_bytes,
            stamped=real_time,
            decimals_as_text=decimals_as_text,
            filters=OutputFilters.of(pipe),
        )
        _ = out.apply(result).schema
        check_repeatable(result)
        check_user_states(states := user_states(result), pipe.transform)
        over_events = parts_over_events(result)
        row_by_row = not over_events
        obstacle = "reads tables, which change" if tables else why_not_real_time(result, len(views))
        works_on_several = f"works on several events ({', '.join(over_events)}), which real-time mode cannot"
        if real_time and (refused := obstacle if row_by_row else works_on_several):
            raise BadTransform(f"{refused}. Try: mode: micro-batch")
    except BadConfiguration:
        raise
    except (PySparkException, BadTransform) as error:
        undeclared = [stream for stream, view in views.items() if view.columns is None]
        problem, line = shorten(error), None
        if pipe.transform.sql is not None:
            problem, line = _locate(_find_unknown_view(error, [*views, *pipe.transform.tables]) or problem, str(error))
        hint = _hint(problem, pipe.transform, undeclared)
        raise BadConfiguration(
            [document.problem(key, f"{problem.rstrip('.')}. {hint}" if hint else problem, line)]
        ) from error
    except Exception as error:  # the operator's own code: any error is a mistake in that file
        raise BadConfiguration([document.problem(key, f"{type(error).__name__}: {shorten(error)}")]) from error
    version = pipe_version(pipe)
    prepared = Prepared(
        name, pipe.transform, views, definition, out, row_by_row, real_time, version, obstacle, tables=tables
    )
    if row_by_row:
        return replace(prepared, shows_event=shows_all_of_event(result))
    plan = _plan_state(session, prepared, file)
    idle = plan is None or plan.kinds != {USER_STATE} or any(state.needs_idle_batches for state in states)
    return replace(prepared, plan=plan, idle_batches=idle)


def _plan_state(session: SparkSession, prepared: Prepared, file: PipeFile) -> StatePlan | None:
    """None: `check_suitability` says why the transform cannot run on a stream."""
    empty = session.createDataFrame([], RAW)
    views = {}
    for stream, view in prepared.views.items():
        required = set() if view.columns is None else {one.name for one in view.columns.fields if not one.nullable}
        fields = view.good(view.check(empty)).schema.fields
        views[stream] = StructType([StructField(one.name, one.dataType, one.name not in required) for one in fields])
    declared = {stream: file.streams[stream].columns for stream in prepared.views}
    transform, code = prepared.transform, prepared.definition.code
    tables = {name: file.tables[name].columns for name in prepared.tables}
    try:
        return describe_state(
            session,
            lambda own, frames: prepared.analyse(frames, own),
            views,
            watermarked=prepared.watermarked,
            code=prepared.definition.source,
            text=text_digest(transform, declared, code, tables),
            tables={name: table.columns for name, table in prepared.tables.items()},
        )
    except PySparkException:
        return None


def _find_filter_mistakes(session: SparkSession, result: StructType, outputs: Mapping[str, Output]) -> dict[str, str]:
    """The reason why a filter cannot be used, by the output's name. result: the columns of the transform's result."""
    found = {}
    for name, output in outputs.items():
        if output.where is not None and (reason := _mistake(session, result, output.where)):
            found[name] = reason
    return found


def _mistake(session: SparkSession, result: StructType, where: str) -> str | None:
    try:
        frame = session.createDataFrame([], result).select(f.expr(where).alias("taken"))
        kind = frame.schema["taken"].dataType
        plan = analyzed_plan(frame)
        if not isinstance(kind, BooleanType):
            return f"is {kind.simpleString()}, not a condition. Try: a comparison, as in amount > 100"
        if {str(node.nodeName()) for node in walk(plan)} - {"Project", "LocalRelation", "LogicalRDD"}:
            return "must look at one row alone. Try: put aggregates, windows and subqueries into the transform itself"
        if parts := nondeterministic_parts(frame):
            return (
                f"gives another answer when a batch is computed again after a crash: {', '.join(parts)}. "
                "Try: a condition over the event"
            )
    except PySparkException as error:
        return f"{shorten(error).rstrip('.')}. Try: the columns of the result: {', '.join(result.names)}"
    return None


def _find_unknown_view(error: Exception, views: Sequence[str]) -> str:
    """The name in SQL that is no view, with the names of all views; "" for other mistakes."""
    if not isinstance(error, PySparkException) or error.getCondition() != "TABLE_OR_VIEW_NOT_FOUND":
        return ""
    name = (error.getMessageParameters() or {}).get("relationName", "a view")
    return f"this pipe has no source or table {name}; it has {', '.join(views)}"


_PLACE = re.compile(r"\(?line (\d+),? pos (\d+)\)?$")
_FULL_PLACE = re.compile(r"; line (\d+) pos (\d+);?$", re.MULTILINE)


def _locate(problem: str, full: str) -> tuple[str, int | None]:
    """The problem with its place in the text of `sql` as a person counts it; and the line. None: no place is named.

    full: Spark's own words, which have the place also where the problem is cut.
    """
    at_end = _PLACE.search(problem)
    found = at_end or _FULL_PLACE.search(full)
    if found is None:
        return problem, None
    words = problem[: at_end.start()].rstrip(" .;") if at_end else problem
    return f"{words} (line {found[1]} of the SQL, character {int(found[2]) + 1})", int(found[1])


_UNRESOLVED = re.compile(r"\[UNRESOLVED_COLUMN.*? with name (\S+) cannot be resolved")


def _hint(problem: str, transform: Transform, undeclared: Sequence[str]) -> str:
    """A remedy for a column that Spark does not find. undeclared: the sources without `columns`."""
    found = _UNRESOLVED.match(problem)
    if found is None:
        return ""
    if transform.watermark is None and {EVENT_TIME, "window"} & {part.strip("`") for part in found[1].split(".")}:
        return f"{EVENT_TIME} exists only with watermark. Try: watermark: 1m"
    return f"Try: columns: … in {' and '.join(f'streams.{stream}' for stream in undeclared)}" if undeclared else ""


def _parse_columns(ddl: str | None, *, timed: bool) -> StructType | None:
    if ddl is None:
        return None
    try:
        columns = StructType.fromDDL(ddl)
    except PySparkException as error:
        raise BadTransform(next(iter(find_column_mistakes(ddl, timed=timed)), shorten(error))) from error
    if not isinstance(columns, StructType):
        raise BadTransform("a name and a type for each column are needed. Try: id STRING, amount DECIMAL(12,2)")
    if bad := next(find_bad_names(columns.names, timed=timed), ""):
        raise BadTransform(bad)
    return columns
