"""Explains why a payload does not fit the declared columns: the field, its declared type, and the value that was found.

Only for events that Spark has rejected. Spark decides; this file repeats its rules for JSON to name the field.
"""

import base64
import json
import re
from collections.abc import Iterator
from datetime import datetime
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation, localcontext
from itertools import islice
from typing import Any

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    DateType,
    DecimalType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from services.core.security.masking import mask_text

SHOWN_VALUE = 40
"""The most characters of a value that a detail shows."""
_ENOUGH = 100
_EXACT_DIGITS = 76
_MOST_DIGITS = 38
"""Of a DECIMAL in Spark."""
_MORE_DIGITS = 6
"""Behind the declared digits of a DECIMAL: so many are looked at. Later ones are the noise of senders that compute with floats.
And up to DECIMAL(12,…) what is parsed stays in a machine word."""
NOISE = 1e-14
"""Of a number: what a sum of floats may be off by. From about ten million on it is among the digits that are looked at."""
_TIMES = (DateType, TimestampType, TimestampNTZType)
_BITS: dict[type[DataType], int] = {ByteType: 8, ShortType: 16, IntegerType: 32, LongType: 64}
_PLAIN = re.compile(r"\w+", re.ASCII)
_WHOLE = re.compile(r"-?\d{1,19}")


class _Number(str):
    """A number as it is written in the payload."""


def with_decimals(kind: DataType, *, widened: bool) -> DataType:
    """The type, nullable inside. widened: DECIMALs have more digits behind the point, and as many before it as declared.

    Spark rounds a number to the declared digits without a word, so it is parsed with more of them, and compared with itself.
    """
    match kind:
        case DecimalType() if widened:
            seen = min(kind.precision + _MORE_DIGITS, _MOST_DIGITS)
            return DecimalType(seen, seen - kind.precision + kind.scale)
        case StructType():
            fields = (StructField(one.name, with_decimals(one.dataType, widened=widened)) for one in kind.fields)
            return StructType(list(fields))
        case ArrayType():
            return ArrayType(with_decimals(kind.elementType, widened=widened))
        case MapType():
            return MapType(kind.keyType, with_decimals(kind.valueType, widened=widened))
        case _:
            return kind


def most_noise(kind: DecimalType) -> float:
    """The most that a number may be off by, whatever its size: the first digit behind the declared ones always counts."""
    return 0.5 * 10.0 ** -(kind.scale + 1)


def explain_mismatch(payload: bytes, columns: StructType) -> str:
    """The detail of the dead letter. It may show a value of the payload, cut and without secrets.

    For one field it always begins with `field NAME: expected TYPE, found`: `services.core.undelivered.causes` groups by that.
    """
    try:
        found = json.loads(payload, parse_float=_Number, parse_int=_Number, parse_constant=_refuse_constant)
    except RecursionError:
        return "the payload is nested too deeply"
    except json.JSONDecodeError as error:
        return f"the payload is not valid JSON: {error.msg} at character {error.pos + 1}"
    except ValueError as error:
        return f"the payload is not valid JSON: {error}"
    if not isinstance(found, dict):
        return f"the payload is not a JSON object, found {_describe(found)}"
    mismatches = list(islice(_find_mismatches(found, columns, ""), _ENOUGH))
    mismatches.sort(key=lambda one: isinstance(one[1], _TIMES))  # Spark knows more forms of times than Python
    for path, kind, value in mismatches:
        return f"field {path}: expected {_name_of(kind)}, found {_describe(value)}"
    for path, kind, is_there in _find_missing(found, columns, ""):
        return f"field {path}: expected {_name_of(kind)} NOT NULL, found {'null' if is_there else 'no such field'}"
    return "a field does not fit the stream's columns"


def has_required(kind: DataType) -> bool:
    """Whether a part of this type is NOT NULL."""
    match kind:
        case StructType():
            return any(not field.nullable or has_required(field.dataType) for field in kind.fields)
        case ArrayType():
            return has_required(kind.elementType)
        case MapType():
            return has_required(kind.valueType)
        case _:
            return False


def _find_missing(value: Any, kind: DataType, path: str) -> Iterator[tuple[str, DataType, bool]]:
    """(path, declared type, whether it is there as null) of each NOT NULL field that is missing, in the order of the columns."""
    if isinstance(kind, StructType) and isinstance(value, dict):
        for field in kind.fields:
            place, part = _join(path, field.name), value.get(field.name)
            if part is None and not field.nullable:
                yield place, field.dataType, field.name in value
            yield from _find_missing(part, field.dataType, place)
    elif isinstance(kind, ArrayType) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _find_missing(item, kind.elementType, f"{path}[{index}]")
    elif isinstance(kind, MapType) and isinstance(value, dict):
        for key, item in value.items():
            yield from _find_missing(item, kind.valueType, f"{path}[{_quote(key)}]")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _find_mismatches(value: Any, kind: DataType, path: str, depth: int = 0) -> Iterator[tuple[str, DataType, Any]]:
    """(path, declared type, value) of each value that does not fit, in the order of the columns."""
    if value is None:
        return
    if isinstance(kind, StructType) and isinstance(value, dict):
        for field in kind.fields:
            yield from _find_mismatches(value.get(field.name), field.dataType, _join(path, field.name), depth + 1)
    elif isinstance(kind, ArrayType) and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _find_mismatches(item, kind.elementType, f"{path}[{index}]", depth + 1)
    elif isinstance(kind, MapType) and isinstance(value, dict):
        for key, item in value.items():
            yield from _find_mismatches(item, kind.valueType, f"{path}[{_quote(key)}]", depth + 1)
    elif not _fits(value, kind, in_part=depth > 1):
        yield path, kind, value


def _fits(value: Any, kind: DataType, *, in_part: bool) -> bool:
    """Whether Spark parses this value as the type. True when that is not certain. in_part: within a list or an object."""
    is_text = isinstance(value, str) and not isinstance(value, _Number)
    if (bits := _BITS.get(type(kind))) is not None:
        least = -(1 << (bits - 1))
        most = 255 if bits == 8 else -least - 1  # Spark's parser takes unsigned bytes
        return isinstance(value, _Number) and _WHOLE.fullmatch(value) is not None and least <= int(value) <= most
    match kind:
        case FloatType() | DoubleType():
            return isinstance(value, _Number)
        case DecimalType():
            return isinstance(value, str) and _fits_decimal(value, kind, in_part=in_part)
        case BooleanType():
            return isinstance(value, bool)
        case DateType() | TimestampType() | TimestampNTZType():
            return isinstance(value, _Number) or (is_text and _is_time(value))
        case BinaryType():
            return is_text and _is_base64(value)
        case StructType() | ArrayType() | MapType():
            return False
        case _:
            return True


def _fits_decimal(text: str, kind: DecimalType, *, in_part: bool) -> bool:
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        return False
    if not number.is_finite() or (number and number.adjusted() >= kind.precision - kind.scale):
        return False
    widened = with_decimals(kind, widened=True)
    assert isinstance(widened, DecimalType)
    with localcontext(prec=_EXACT_DIGITS):
        seen = number.quantize(Decimal(1).scaleb(-widened.scale), ROUND_HALF_UP)
        off = abs(seen - seen.quantize(Decimal(1).scaleb(-kind.scale), ROUND_HALF_UP))
        return not off or (not in_part and float(off) <= min(float(abs(seen)) * NOISE, most_noise(kind)))


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text.strip())
    except ValueError:
        return False
    return True


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode(text, validate=True)
    except ValueError:
        return False
    return True


def _join(path: str, name: str) -> str:
    shown = name if _PLAIN.fullmatch(name) else _quote(name)
    return f"{path}.{shown}" if path else shown


def _name_of(kind: DataType) -> str:
    """As in the pipe file, without the fields of a struct."""
    return "STRUCT" if isinstance(kind, StructType) else kind.simpleString().partition("<")[0].upper()


def _describe(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case _Number():
            return f"the number {_cut(value)}"
        case str():
            return f"the text {_quote(value)}"
        case list():
            return "a list"
        case _:
            return "an object"


def _quote(text: str) -> str:
    """One line, without quotes inside: `services.core.undelivered.causes` leaves quoted parts out."""
    shown = "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in mask_text(text))
    return "'" + _cut(shown.replace("'", "\N{RIGHT SINGLE QUOTATION MARK}")) + "'"


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN_VALUE else f"{text[:SHOWN_VALUE]}…"
