"""From a raw record to the columns of the view, or to the check that the record fails; and dropping duplicates.

Expressions are built once and used for each batch: building one takes many calls into Java, using it takes one.
Names that start with `_penstock` are ours.
"""

from functools import reduce
from operator import or_
from typing import NamedTuple

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType, DataType, DecimalType, MapType, StringType, StructField, StructType

from services.core import event as names
from spark.records import EVENT, EVENT_TIME, HEADERS, LATEST_MS, RAW_NAMES, READ, VALUE
from spark.transforms.mismatch import NOISE, explain_mismatch, has_required, most_noise, with_decimals

FAILED_CHECK = "_penstock_failed_check"
"""Column: null for an event, else the number of the check that the record fails."""
TIME = "_penstock_time"
"""Column: event time of a record."""
READ_AT = "_penstock_read"
"""Column: when a record was read, ms; of a view with stamps."""
_TEXT = "_penstock_text"
_ID = "_penstock_id"
_PARSED = "_penstock_parsed"
_CORRUPT = "_penstock_corrupt"
_JSON = {"columnNameOfCorruptRecord": _CORRUPT, "mode": "PERMISSIVE", "allowNonNumericNumbers": "false"}


SCHEMA_MISMATCH = "schema_mismatch"


class Check(NamedTuple):
    """One possible fault of a record. reason, detail: of its dead letter. The detail of a SCHEMA_MISMATCH is made per record."""

    failed: Column
    reason: str
    detail: str = ""


class SourceView:
    """The expressions of one source stream.

    columns: those that its payload must have; None: any text. timed: with EVENT_TIME. stamped: events with READ."""

    def __init__(self, columns: StructType | None, *, timed: bool = False, stamped: bool = False) -> None:
        self.columns, self._timed, self._stamped = columns, timed, stamped
        self.checks = _checks(columns)
        parsed = [] if columns is None else [f.from_json(_TEXT, _nullable(columns), _JSON).alias(_PARSED)]
        failed = f.lit(None).cast("int")
        for number, check in reversed(list(enumerate(self.checks))):
            failed = f.when(check.failed, f.lit(number)).otherwise(failed)
        failed = f.when(_is_tombstone(), f.lit(None)).otherwise(failed)
        # One select: later columns name earlier ones. Each further one would be analysed again for every batch.
        self._checked: list[Column | str] = [
            *RAW_NAMES,
            f.col("value").cast("string").alias(_TEXT),
            header(names.ID).alias(_ID),
            event_time().alias(TIME),
            *parsed,
            failed.alias(FAILED_CHECK),
        ]
        self._is_good = f.col(FAILED_CHECK).isNull() & f.col("value").isNotNull()
        self._is_bad = f.col(FAILED_CHECK).isNotNull()
        self._seen = [*_seen_columns(columns, stamped=stamped), *([f.col(TIME).alias(EVENT_TIME)] if timed else [])]

    def with_columns(self, columns: StructType | None) -> "SourceView":
        """The same with other columns."""
        return SourceView(columns, timed=self._timed, stamped=self._stamped)

    def check(self, raw: DataFrame, clock: Column | None = None) -> DataFrame:
        """Raw plus FAILED_CHECK and TIME. clock: the value of READ (ms); without one it is null."""
        if not self._stamped:
            return raw.select(*self._checked)
        now = f.lit(None) if clock is None else clock
        return raw.select(*self._checked, now.cast("long").alias(READ_AT))

    def good(self, checked: DataFrame) -> DataFrame:
        """The view of the events: `event`, `value` and the declared columns. Tombstones are neither good nor bad: they were read,
        and nothing was made of them, so they are filtered."""
        return checked.where(self._is_good).select(*self._seen)

    def bad(self, checked: DataFrame) -> DataFrame:
        """The records that fail a check: raw columns and FAILED_CHECK."""
        return checked.where(self._is_bad).select(*RAW_NAMES, FAILED_CHECK)

    def explain(self, check: Check, payload: bytes) -> str:
        """The detail of the dead letter of a record that fails this check."""
        if check.reason == SCHEMA_MISMATCH and self.columns is not None:
            return explain_mismatch(payload, self.columns)
        return check.detail

    def good_raw(self, checked: DataFrame) -> DataFrame:
        """The events as they were read: raw columns and TIME."""
        return checked.where(self._is_good).select(*RAW_NAMES, TIME)


def _nullable(columns: StructType) -> StructType:
    """The type of what is parsed. All is nullable there, as Spark makes it."""
    fields = [StructField(field.name, with_decimals(field.dataType, widened=True), True) for field in columns.fields]
    return StructType([*fields, StructField(_CORRUPT, StringType())])


def _as_declared(field: StructField) -> Column:
    """The column as it was declared, of a parsed payload."""
    declared, parsed = with_decimals(field.dataType, widened=False), f.col(_PARSED)[field.name]
    return parsed if declared == with_decimals(field.dataType, widened=True) else parsed.try_cast(declared)


def _is_rounded(field: StructField) -> Column | None:
    """Whether a number of this column has more digits behind the point than declared; None: it has no DECIMAL."""
    widened = with_decimals(field.dataType, widened=True)
    if widened == with_decimals(field.dataType, widened=False):
        return None
    parsed, back = f.col(_PARSED)[field.name], _as_declared(field).cast(widened)
    if any(kind in field.dataType.simpleString() for kind in ("map<", "variant")):  # Spark compares neither
        return f.to_json(f.struct(parsed.alias("x"))) != f.to_json(f.struct(back.alias("x")))
    differs = ~parsed.eqNullSafe(back)
    if isinstance(field.dataType, DecimalType):
        noise = f.abs(parsed - back).cast("double")
        most = f.least(f.abs(parsed).cast("double") * NOISE, f.lit(most_noise(field.dataType)))
        return differs & ~f.coalesce(noise <= most, f.lit(False))
    return differs


def _checks(columns: StructType | None) -> list[Check]:
    event_id, text = f.col(_ID), f.col(_TEXT)
    checks = [
        Check(f.col("value").isNull(), "bad_record", "the record has no value"),
        Check(event_id.isNull(), "bad_record", f"the record has no header {names.ID}"),
        Check(~f.is_valid_utf8(event_id.cast("string")), "bad_record", f"the header {names.ID} is not UTF-8"),
        Check(
            header(names.FAULT).isNotNull(),
            "bad_record",
            f"a rule of its stream in the pipe file does not fit it; the header {names.FAULT} says why",
        ),
        Check(~f.is_valid_utf8(text), "bad_record", "the payload is not UTF-8 text"),
    ]
    if columns is None:
        return checks
    # from_json takes the first element of an array and ignores text after the first value: check both ends.
    trimmed = f.btrim(text, f.lit(" \t\r\n"))  # splits the text into characters: only where necessary
    is_object = f.when(_has_braces(text), True).otherwise(_has_braces(trimmed))
    parsed = f.col(_PARSED)
    unfit = parsed.isNull() | parsed[_CORRUPT].isNotNull()
    checks += [Check(~is_object, SCHEMA_MISMATCH), Check(unfit, SCHEMA_MISMATCH)]
    rounded = (found for field in columns.fields if (found := _is_rounded(field)) is not None)
    checks += [Check(found, SCHEMA_MISMATCH) for found in rounded]
    required = (found for field in columns.fields if (found := _lacks(field, parsed)) is not None)
    return checks + [Check(found, SCHEMA_MISMATCH) for found in required]


def _lacks(field: StructField, parent: Column) -> Column | None:
    """Whether this NOT NULL field is missing in an object, or one within it; None: nothing of it is NOT NULL. Null means no."""
    value = parent[field.name]
    inside = _lacks_inside(field.dataType, value)
    if field.nullable:
        return inside
    return value.isNull() if inside is None else value.isNull() | inside


def _lacks_inside(kind: DataType, value: Column) -> Column | None:
    """As `_lacks`, for the parts of a value. A value that is null lacks none of them."""
    match kind:
        case StructType():
            found = [one for field in kind.fields if (one := _lacks(field, value)) is not None]
            return value.isNotNull() & reduce(or_, found) if found else None
        case ArrayType() if has_required(kind.elementType):
            return f.exists(value, lambda item: _as_bool(_lacks_inside(kind.elementType, item)))
        case MapType() if has_required(kind.valueType):
            return f.exists(f.map_values(value), lambda item: _as_bool(_lacks_inside(kind.valueType, item)))
        case _:
            return None


def _as_bool(found: Column | None) -> Column:
    return f.lit(False) if found is None else f.coalesce(found, f.lit(False))


def _is_tombstone() -> Column:
    """Of a compacted stream: the key of this event is gone. Without a key or an id it is a damaged record; not so in a topic of
    others, where any record may have no value."""
    of_others = f.startswith(header(names.ORIGIN), f.lit(names.OF_TOPIC.encode()))
    return f.col("value").isNull() & f.col(_ID).isNotNull() & (f.col("key").isNotNull() | of_others)


def _has_braces(text: Column) -> Column:
    return f.startswith(text, f.lit("{")) & f.endswith(text, f.lit("}"))


def _seen_columns(columns: StructType | None, *, stamped: bool) -> list[Column]:
    declared = [] if columns is None else columns.fields
    payload = [] if VALUE in [field.name.lower() for field in declared] else [f.col(_TEXT).alias(VALUE)]
    event = f.struct(
        f.col(_ID).cast("string").alias("id"),
        f.col("key"),
        f.col(TIME).alias("time"),
        _millis(names.ARRIVAL).alias("arrival"),
        header(names.CE_PREFIX + "type").cast("string").alias("type"),
        header(names.CE_PREFIX + "source").cast("string").alias("source"),
        f.coalesce(f.col("headers"), f.array().cast(HEADERS)).alias("headers"),
        f.col("topic"),
        f.col("partition"),
        f.col("offset"),
        *([f.col(READ_AT).alias(READ)] if stamped else []),
    )
    return [event.alias(EVENT), *payload, *[_as_declared(field).alias(field.name) for field in declared]]


def event_time() -> Column:
    """Of a raw record: its timestamp; its time header, where that is not the last one."""
    return f.coalesce(_millis(names.TIME), f.col("timestamp"))


def _millis(name: str) -> Column:
    """A header in milliseconds since the epoch as a timestamp; null when missing or no such number."""
    number = header(name).cast("string").try_cast("long")
    return f.when(number.between(0, LATEST_MS), f.timestamp_millis(number))


def header(name: str) -> Column:
    """The first header of this name of a raw record, or null."""
    # array_position runs as generated code; a lambda (filter) costs five times as much.
    return f.get(f.col("headers.value"), (f.array_position(f.col("headers.key"), name) - 1).cast("int"))


_SEEN = "_penstock_seen"
_KEY = "_penstock_key"


def drop_duplicates(raw: DataFrame, within: float) -> DataFrame:
    """A raw stream without records whose stream and id were read before, at most `within` seconds ago. Records without id stay,
    and so do dead letters that were sent again: their first reading passed on nothing.

    Time is the time of processing: that of each batch, never that of the events. So the watermark over it only makes Spark forget
    ids; it never drops a late event. (`Checkpoint.check_clock` handles the exception, a clock that is set back.)
    """
    own_key = f.concat_ws("/", "topic", "partition", "offset")
    stays = header(names.ID).isNull() | header(names.REDRIVEN).isNotNull()
    key = f.when(stays, own_key).otherwise(f.concat_ws(":", f.col("topic"), f.base64(header(names.ID))))
    marked = raw.withColumn(_KEY, key).withColumn(_SEEN, f.current_timestamp())
    kept = marked.withWatermark(_SEEN, f"{round(within * 1000)} milliseconds").dropDuplicatesWithinWatermark([_KEY])
    return kept.select(*RAW_NAMES)
