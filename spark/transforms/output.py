"""From a transform's result to records: its contract, checked once before anything runs, and the expressions.

A transform returns `event`, unchanged, and the payload: `value` alone, or other columns, which become a JSON object. Or, for
events that did not exist before, it returns `id` (the same again when a batch is computed again), optionally `key` and `time`,
and the payload.

New events get origins: the same ones when a batch is computed again. A task numbers its rows. The distribution of rows over tasks
follows from the batch's offsets and the session's settings. So each task has as many rows again, maybe in another order.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DecimalType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from services.core import event as names
from services.core.ledger.report import MAX_NUMBER
from spark.jvm.classes import MOMENT
from spark.records import EVENT, EVENT_TYPE, HEADERS, READ, STAMPED_EVENT_TYPE, VALUE
from spark.transforms.output_filters import OutputFilters
from spark.transforms.view import READ_AT

_ROWS = 1 << 20
_BATCHES = MAX_NUMBER // _ROWS
_TASKS = 1 << 16


class OriginNumbering(NamedTuple):
    """Origins of a batch's new events. incarnation, first: as in origins. at_ms: the time of the batch, and of their arrival."""

    incarnation: str
    first: int
    at_ms: int

    def origin(self) -> Column:
        """The packed origin of a row. A task's rows beyond the room for them go to another partition of the incarnation."""
        row = f.monotonically_increasing_id().bitwiseAND((1 << 33) - 1)
        partition = f.spark_partition_id() + f.shiftright(row, _ROWS.bit_length() - 1) * _TASKS
        number = _moment(f.lit(self.first)) + row.bitwiseAND(_ROWS - 1)
        return f.concat_ws(":", f.lit(self.incarnation), partition.cast("string"), number.cast("string"))


def number_batch(query_id: str, batch: int, at_ms: int, mark: str = "") -> OriginNumbering:
    """query_id: of the checkpoint, [a-z0-9]. mark: of a part of a batch, [a-z0-9]: its rows have an incarnation of their own.

    After some batches a new incarnation begins, before the numbers grow too large.
    """
    return OriginNumbering(f"{query_id}{batch // _BATCHES:08x}{mark}", batch % _BATCHES * _ROWS, at_ms)


_JSON = {"ignoreNullFields": "false"}
_HEADER_ROOM = 64 * 1024
_PAYLOAD = "_penstock_payload"
_NEW_EVENT = ("id", "key", "time")


class BadTransform(ValueError):
    """The transform cannot be run; the message has the reason and a remedy."""


class OutShape:
    """The expressions from a transform's result to records of at most `max_bytes`."""

    def __init__(
        self,
        result: StructType,
        *,
        declared: Iterable[str],
        max_bytes: int,
        stamped: bool = False,
        decimals_as_text: bool = False,
        filters: OutputFilters | None = None,
    ) -> None:
        """declared: columns of the sources; one named `value` hides the payload's text. stamped: events have READ. filters: of
        several outputs; checked.

        Raises BadTransform.
        """
        fields = self._fields = {field.name.lower(): field for field in result.fields}
        if len(fields) < len(result.fields):
            raise BadTransform("returns two columns of one name. Try: AS with another name")
        self.carries_events = EVENT in fields
        if self.carries_events:
            _expect_event(fields[EVENT].dataType, stamped=stamped)
        else:
            _expect_new_event(fields)
        self.gives_times = self.carries_events or "time" in fields
        envelope = {EVENT} if self.carries_events else set(_NEW_EVENT)
        payload = [field for name, field in fields.items() if name not in envelope]
        hidden = {name.lower() for name in declared}
        self._value = _payload(StructType(payload), hidden, decimals_as_text=decimals_as_text)
        self._max_bytes, self._filters = max_bytes, filters
        self.stamped = stamped and self.carries_events
        self.payload = StructType(payload)
        """The columns of the result that are no envelope."""
        self._columns = self._make(None)

    def apply(self, result: DataFrame, numbering: OriginNumbering | None = None) -> DataFrame:
        """The transform's result as records, stamped ones with READ_AT. Executing it raises for a row without payload,
        event or id.

        numbering: gives new events their origins and their time; without one they have no origin.
        """
        if self._filters is not None and self._filters.taken is not None:
            result = result.where(self._filters.taken)
        made, checked = self._columns if numbering is None else self._make(numbering)
        return result.select(*made).select(*checked)

    def _make(self, numbering: OriginNumbering | None) -> tuple[list[Column], list[Column | str]]:
        """The parts of the record, and from them the record with its checks.

        Two projections: the checks name the payload several times, and Spark would make it each time. And a join of streams
        keeps the fields of `event` in the order in which the first projection names them. With another order Spark
        refuses the state of earlier versions: tests/upgrade/test_state.py.
        """
        if self.carries_events:
            key, time, headers = f.col("event.key"), f.col("event.time"), f.col("event.headers")
        else:
            key, time, headers = _new_event(self._fields, numbering)
        if self._filters is not None:
            headers = f.concat(headers, f.array(self._filters.header).cast(HEADERS))
        stamp = [f.col(EVENT)[READ].alias(READ_AT)] if self.stamped else []
        made = [
            key.alias("key"),
            self._value.alias(_PAYLOAD),
            headers.alias("headers"),
            time.alias("timestamp"),
            *stamp,
        ]
        value = _guard(f.col(_PAYLOAD), f.col("key"), f.col("headers"), self._max_bytes).alias("value")
        return made, ["key", value, "timestamp", "headers", *([READ_AT] if self.stamped else [])]


def _expect_event(found: DataType, *, stamped: bool) -> None:
    wanted = StructType.fromDDL(STAMPED_EVENT_TYPE if stamped else EVENT_TYPE)
    if found.simpleString() != wanted.simpleString():
        raise BadTransform(f"returns an `{EVENT}` that is not the one it got. Try: SELECT {EVENT}, …")


def _expect_new_event(fields: Mapping[str, StructField]) -> None:
    types: dict[str, DataType] = {name: field.dataType for name, field in fields.items()}
    if "id" not in types:
        raise BadTransform(
            f"returns neither `{EVENT}` nor `id`. Try: SELECT {EVENT}, … or, for new events, SELECT … AS id, …"
        )
    if not isinstance(types["id"], StringType):
        raise BadTransform(f"returns `id` as {types['id'].simpleString()}. Try: CAST(… AS STRING) AS id")
    if not isinstance(types.get("key", StringType()), StringType | BinaryType):
        raise BadTransform(f"returns `key` as {types['key'].simpleString()}. Try: CAST(… AS STRING) AS key")
    if not isinstance(types.get("time", TimestampType()), TimestampType):
        raise BadTransform(f"returns `time` as {types['time'].simpleString()}. Try: CAST(… AS TIMESTAMP) AS time")


def _new_event(fields: Mapping[str, StructField], numbering: OriginNumbering | None) -> tuple[Column, Column, Column]:
    millis = _moment(f.unix_millis(f.current_timestamp()) if numbering is None else f.lit(numbering.at_ms))
    now = f.timestamp_millis(millis)
    key = f.col("key").cast("binary") if "key" in fields else f.lit(None).cast("binary")
    time = f.coalesce(f.col("time"), now) if "time" in fields else now
    event_id = _or_raise(f.col("id"), "the transform returned a row without id").cast("binary")
    arrival = millis.cast("string").cast("binary")
    pairs = [(names.ID, event_id), (names.ARRIVAL, arrival)]
    if numbering is not None:
        pairs.append((names.ORIGIN, numbering.origin().cast("binary")))
    headers = f.array(*[f.struct(f.lit(name).alias("key"), value.alias("value")) for name, value in pairs])
    return key, time, headers.cast(HEADERS)


def _moment(number: Column) -> Column:
    """A number that another batch has another one of. A plain one would be in the code that Spark generates, and each batch would
    compile its own code."""
    return f.call_function(MOMENT, number.cast("long"))


def _payload(payload: StructType, declared: set[str], *, decimals_as_text: bool) -> Column:
    if not payload.fields:
        raise BadTransform(f"returns no payload. Try: SELECT {EVENT}, {VALUE}")
    if [name.lower() for name in payload.names] == [VALUE] and VALUE not in declared:
        if not isinstance(payload.fields[0].dataType, StringType | BinaryType):
            kind = payload.fields[0].dataType.simpleString()
            raise BadTransform(f"returns `{VALUE}` as {kind}. Try: CAST({VALUE} AS STRING) AS {VALUE}, or another name")
        return f.col(VALUE).cast("binary")
    columns = []
    for field in payload.fields:
        column = f.col(f"`{field.name}`")
        if decimals_as_text and (written := _without_decimals(field.dataType)) != field.dataType:
            column = column.cast(written).alias(field.name)
        columns.append(column)
    return f.to_json(f.struct(*columns), _JSON).cast("binary")


def _without_decimals(kind: DataType) -> DataType:
    """The type with texts in place of decimals. Keys of maps are texts in JSON anyway."""
    match kind:
        case DecimalType():
            return StringType()
        case StructType():
            fields = (StructField(one.name, _without_decimals(one.dataType), one.nullable) for one in kind.fields)
            return StructType(list(fields))
        case ArrayType():
            return ArrayType(_without_decimals(kind.elementType), kind.containsNull)
        case MapType():
            return MapType(kind.keyType, _without_decimals(kind.valueType), kind.valueContainsNull)
        case _:
            return kind


def _guard(value: Column, key: Column, headers: Column, max_bytes: int) -> Column:
    """The payload, unless there is none or the record would be too large: then executing the batch raises."""
    length = f.octet_length(value) + f.coalesce(f.octet_length(key), f.lit(0))
    # Not by a lambda (aggregate): it would take the whole projection out of generated code.
    texts = f.array_join(headers["value"].cast("array<string>"), "")
    of_headers = f.length(f.array_join(headers["key"], "")) * 4 + f.octet_length(texts)
    too_large = (length > max_bytes - _HEADER_ROOM) & (length + of_headers > max_bytes)
    checked = f.when(too_large, f.raise_error(f.lit(f"the record is larger than {max_bytes} bytes"))).otherwise(value)
    return _or_raise(checked, "the transform returned a row without payload")


def _or_raise(column: Column, message: str) -> Column:
    return f.when(column.isNull(), f.raise_error(f.lit(message))).otherwise(column)
