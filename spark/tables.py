"""Reference data: small tables that transforms join with their events, read again and again while the service runs.

A table is read in full into the driver's memory. So a transform never sees half of a new content, its plans have neither the
place of the data nor a password, and a source that fails takes nothing away. The next micro-batch uses a new content. A
transform in the streaming plan starts its query again for it.

A batch that is computed again after a crash may use a newer content than the first time: its results may differ, their ids may
not, because ids come from the event.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
import structlog
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import MapType, StructType

from services.core import metrics
from services.core.backoff import Backoff
from services.core.pipe_file.table import Jdbc, Table
from services.core.security.credentials import BadCredential, read_value
from services.core.security.masking import mask_text
from spark.errors import java_causes, shorten
from spark.java import JAVA_ERRORS, list_files, session_id
from spark.session import own_session

log = structlog.get_logger()

MAX_BYTES = 64 << 20
"""Of a table in memory, as Arrow."""
FIRST_WAIT_S, MAX_WAIT_S = 1.0, 30.0
"""Between attempts after a failure; never longer than `refresh`."""
TICK_S = 0.25
_DRIVER = "org.postgresql.Driver"
_TIMEOUTS = {"queryTimeout": "60", "fetchsize": "10000", "connectTimeout": "10", "socketTimeout": "120"}
_READINGS = 3
_BEING_READ = "it is being read"


class TableUnavailable(Exception):
    """A table could not be read. The message names it, and never shows a secret."""


class ReferenceTable:
    """One table. `load` is called by one thread at a time, everything else by any."""

    def __init__(self, name: str, definition: Table, columns: StructType, folder: Path) -> None:
        """folder: of the pipe file. columns: `definition.columns`; none of them is a map."""
        self.name, self.definition, self.columns = name, definition, columns
        self.version = 0
        """Grows with each content that differs from the one before; 0: none was read."""
        self.problem = _BEING_READ
        """Why the last reading failed; "" when it did not."""
        self._folder = folder
        self._content: Any = None
        self._files: list[tuple[str, int, int]] | None = None
        self._frames: dict[str, tuple[int, DataFrame]] = {}

    @property
    def is_read(self) -> bool:
        """Whether it has a content."""
        return self._content is not None

    def forget(self) -> None:
        """Drop the content. By the thread that calls `load`."""
        self._content, self._files, self.problem = None, None, _BEING_READ

    def frame(self, session: SparkSession) -> DataFrame:
        """The present content, for this session. Raises TableUnavailable when there is none."""
        version, content = self.version, self._content
        if content is None:
            raise TableUnavailable(f"table {self.name!r} was not read yet: {self.problem}")
        own = session_id(session)
        kept = self._frames.get(own)
        if kept is None or kept[0] != version:
            made = session.createDataFrame(content, self.columns)
            kept = (version, f.broadcast(made))  # the events stay where they are: no shuffle
            self._frames = {name: one for name, one in self._frames.items() if one[0] == version} | {own: kept}
        return kept[1]

    def empty(self, session: SparkSession) -> DataFrame:
        """A frame with its columns, for an analysis."""
        return session.createDataFrame([], self.columns)

    def unread(self, session: SparkSession) -> DataFrame:
        """As `empty`, but Spark's optimiser does not know that there are no rows."""
        return session.createDataFrame(session.sparkContext.emptyRDD(), self.columns)

    def load(self, session: SparkSession) -> bool:
        """Read the content; returns whether it has changed. Blocking. Raises TableUnavailable; then the last content stays."""
        password = ""
        try:
            if self.definition.jdbc is not None:
                password = self._password(self.definition.jdbc)
                found = self._collect(_read_database(session, self.definition.jdbc, password))
            elif (files := self._list_files(session)) == self._files:
                return False
            else:
                found = self._read_files(session, files)
        except (*JAVA_ERRORS, BadCredential, TableUnavailable) as error:
            problem = str(error) if isinstance(error, BadCredential | TableUnavailable) else _describe(error)
            self.problem = mask_text(problem.replace(password, "…") if password else problem)
            raise TableUnavailable(f"table {self.name!r} cannot be read: {self.problem}") from None
        self.problem = ""
        if self._content is not None and _same(self._content, found):
            return False
        self._content = found
        self.version += 1
        return True

    @property
    def rows(self) -> int:
        return 0 if self._content is None else int(self._content.num_rows)

    def _password(self, database: Jdbc) -> str:
        return "" if database.password is None else read_value(database.password, self._folder, os.environ)

    def _list_files(self, session: SparkSession) -> list[tuple[str, int, int]]:
        found = list_files(session, self._uri)
        if not found:
            raise TableUnavailable(f"{self._uri} has no files")
        return found

    def _read_files(self, session: SparkSession, files: list[tuple[str, int, int]]) -> Any:
        """Again when files are replaced meanwhile: half of each content would be wrong."""
        for _ in range(_READINGS):
            found = self._collect(session.read.parquet(self._uri))
            if (now := self._list_files(session)) == files:
                self._files = files
                return found
            files = now
        raise TableUnavailable(f"the files of {self._uri} changed again and again while they were read")

    @property
    def _uri(self) -> str:
        assert self.definition.parquet is not None
        place = self.definition.parquet
        return place if urlsplit(place).scheme else (self._folder.absolute() / place).as_uri()

    def _collect(self, frame: DataFrame) -> Any:
        """An Arrow table, in an order that only depends on the rows."""
        most = self.definition.max_rows
        columns = [f.col(f"`{one.name}`").cast(one.dataType).alias(one.name) for one in self.columns.fields]
        wanted = frame.limit(most + 1).select(*columns)
        found = wanted.orderBy(f.xxhash64(*[f.col(f"`{one}`") for one in wanted.columns])).toArrow()
        if found.num_rows > most:
            raise TableUnavailable(f"it has more than {most:,} rows. Try: a smaller query, or a larger max_rows")
        if found.nbytes > MAX_BYTES:
            raise TableUnavailable(
                f"it has {found.nbytes >> 20} MB in memory, the limit is {MAX_BYTES >> 20} MB. Try: fewer columns"
            )
        for one in self.columns.fields:
            if not one.nullable and found.column(one.name).null_count:
                raise TableUnavailable(f"column {one.name!r} is NOT NULL in the pipe file and has NULL")
        return found


def _same(one: pa.Table, other: pa.Table) -> bool:
    """Whether two contents have the same bits: in Arrow, NaN is not equal to itself."""
    if one.schema != other.schema or one.num_rows != other.num_rows:
        return False
    return all(_bits(first).equals(_bits(second)) for first, second in zip(one.columns, other.columns, strict=True))


def _bits(column: pa.ChunkedArray) -> pa.Array:
    return pa.concat_arrays(column.chunks).view(_as_bits(column.type)) if column.num_chunks else pa.nulls(0)


def _as_bits(kind: pa.DataType) -> pa.DataType:
    """The same layout, with integers in place of floats. Tables have no maps."""
    if pa.types.is_floating(kind):
        return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}[kind.bit_width]
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_as_bits(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_as_bits(kind.value_type)))
    return kind


def _read_database(session: SparkSession, database: Jdbc, password: str) -> DataFrame:
    options = {"url": database.url, "query": database.query, "user": database.user, "driver": _DRIVER, **_TIMEOUTS}
    reader = session.read.format("jdbc").options(**options)
    return (reader.option("password", password) if password else reader).load()


def _describe(error: BaseException) -> str:
    """With the last cause: Spark's own words only say that a connection failed."""
    text, causes = shorten(error), java_causes(error)
    return f"{text} ({causes[-1]})" if len(causes) > 1 else text


def has_map(columns: StructType) -> bool:
    """Whether a column is a map: maps have no order, so contents could not be compared."""
    return any(isinstance(one.dataType, MapType) or "map<" in one.dataType.simpleString() for one in columns.fields)


class TableRefresher:
    """Reads all tables of a process, in a thread of its own, until `stop`."""

    def __init__(
        self,
        session: SparkSession,
        tables: Iterable[ReferenceTable],
        in_use: Callable[[ReferenceTable], bool] = lambda _: True,
    ) -> None:
        """in_use: called often. A table that is not in use is not read, and has no content: a process that stands by would ask
        for executors, and would begin with an old content."""
        self._session, self._stop, self._in_use = session, threading.Event(), in_use
        self._due = dict.fromkeys(tables, 0.0)
        self._good = dict.fromkeys(self._due, time.monotonic())
        self._backoffs = {
            table: Backoff(FIRST_WAIT_S, min(MAX_WAIT_S, table.definition.refresh)) for table in self._due
        }
        self._thread = threading.Thread(target=self._run, name="tables", daemon=True)

    def start(self) -> None:
        for table in self._due:
            metrics.TABLE_REFRESH.labels(table.name).set(table.definition.refresh)
            metrics.TABLE_FAILURES.labels(table.name)
        if self._due:
            self._thread.start()

    def stop(self) -> None:
        """Does not wait for a reading."""
        self._stop.set()

    def _run(self) -> None:
        session = own_session(self._session)
        session.sparkContext.setLocalProperty("spark.scheduler.pool", "tables")
        while not self._stop.is_set():
            for table, due in self._due.items():
                if not self._in_use(table):
                    table.forget()
                    self._due[table], self._good[table] = 0.0, time.monotonic()
                elif time.monotonic() >= due and not self._stop.is_set():
                    self._due[table] = time.monotonic() + self._refresh(session, table)
                metrics.TABLE_AGE.labels(table.name).set(time.monotonic() - self._good[table])
            self._stop.wait(TICK_S)

    def _refresh(self, session: SparkSession, table: ReferenceTable) -> float:
        """Returns the seconds until the next reading."""
        backoff = self._backoffs[table]
        try:
            changed = table.load(session)
        except Exception as error:  # whatever it was, the last content stays
            metrics.TABLE_FAILURES.labels(table.name).inc()
            if not backoff.failures:
                log.error(  # noqa: TRY400  the error names the table and the cause; a stack would not help
                    "table_not_refreshed",
                    table=table.name,
                    error=str(error),
                    hint="the table's last content stays in use",
                )
            backoff.fail()
            return backoff.delay()
        self._good[table] = time.monotonic()
        if changed or backoff.failures:
            log.info("table_refreshed", table=table.name, rows=table.rows, changed=changed, failures=backoff.failures)
            metrics.TABLE_ROWS.labels(table.name).set(table.rows)
        backoff.reset()
        return table.definition.refresh


def unread_tables(tables: Mapping[str, ReferenceTable]) -> str:
    """Why a transform with these tables cannot run; "" when each has been read."""
    return "; ".join(
        f"table {one.name!r} was not read yet: {one.problem}" for one in tables.values() if not one.is_read
    )
