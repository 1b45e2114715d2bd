"""The details of events that do not fit the declared columns."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as f
from pyspark.sql import types as t

from services.core.event import ID
from services.core.undelivered.causes import normalise
from spark.records import RAW
from spark.transforms.mismatch import explain_mismatch
from spark.transforms.view import FAILED_CHECK, SourceView

LINE = t.StructType().add("n", t.IntegerType())
COLUMNS = (
    t.StructType()
    .add("tiny", t.ByteType())
    .add("qty", t.IntegerType())
    .add("total", t.LongType())
    .add("price", t.DecimalType(5, 2))
    .add("ratio", t.DoubleType())
    .add("paid", t.BooleanType())
    .add("at", t.TimestampType())
    .add("day", t.DateType())
    .add("raw", t.BinaryType())
    .add("tags", t.ArrayType(t.StringType()))
    .add("street2", t.StructType().add("zip", t.IntegerType()).add("lines", t.ArrayType(LINE)))
    .add("prices", t.MapType(t.StringType(), t.IntegerType()))
    .add("sums", t.ArrayType(t.StructType().add("net", t.DecimalType(4, 2))))
    .add("rates", t.MapType(t.StringType(), t.DecimalType(5, 2)))
    .add("huge", t.DecimalType(38, 20))
    .add("sum", t.DecimalType(18, 2))
    .add("odd name", t.IntegerType())
    .add(
        "buyer",
        t.StructType()
        .add("name", t.StringType(), False)
        .add("home", t.StructType().add("zip", t.IntegerType(), False)),
    )
    .add("items", t.ArrayType(t.StructType().add("sku", t.StringType(), False).add("n", t.IntegerType())))
    .add("stock", t.MapType(t.StringType(), t.ArrayType(t.StructType().add("n", t.IntegerType(), False))))
    .add("id", t.StringType(), nullable=False)
)
MISMATCHES: list[tuple[dict[str, Any], str]] = [
    ({"qty": "many"}, "field qty: expected INT, found the text 'many'"),
    ({"qty": 1.5}, "field qty: expected INT, found the number 1.5"),
    ({"qty": 99999999999}, "field qty: expected INT, found the number 99999999999"),
    ({"tiny": 256}, "field tiny: expected TINYINT, found the number 256"),
    ({"total": True}, "field total: expected BIGINT, found true"),
    ({"price": 12345.5}, "field price: expected DECIMAL(5,2), found the number 12345.5"),
    ({"price": "cheap"}, "field price: expected DECIMAL(5,2), found the text 'cheap'"),
    ({"price": 999.994}, "field price: expected DECIMAL(5,2), found the number 999.994"),
    ({"price": "1.505"}, "field price: expected DECIMAL(5,2), found the text '1.505'"),
    ({"price": 999.999}, "field price: expected DECIMAL(5,2), found the number 999.999"),
    ({"sums": [{"net": 1.5}, {"net": 1e-7}]}, "field sums[1].net: expected DECIMAL(4,2), found the number 1e-07"),
    ({"rates": {"EUR": 1.25, "USD": 1.055}}, "field rates['USD']: expected DECIMAL(5,2), found the number 1.055"),
    ({"sum": 12345678.9100004}, "field sum: expected DECIMAL(18,2), found the number 12345678.9100004"),
    ({"sum": "1234567890123456.789"}, "field sum: expected DECIMAL(18,2), found the text '1234567890123456.789'"),
    ({"ratio": "0.5"}, "field ratio: expected DOUBLE, found the text '0.5'"),
    ({"paid": 0}, "field paid: expected BOOLEAN, found the number 0"),
    ({"at": "soon"}, "field at: expected TIMESTAMP, found the text 'soon'"),
    ({"day": "someday"}, "field day: expected DATE, found the text 'someday'"),
    ({"day": "soon", "qty": {}}, "field qty: expected INT, found an object"),
    ({"raw": "***"}, "field raw: expected BINARY, found the text '***'"),
    ({"tags": "a"}, "field tags: expected ARRAY, found the text 'a'"),
    ({"street2": [1]}, "field street2: expected STRUCT, found a list"),
    ({"street2": {"zip": "x1"}}, "field street2.zip: expected INT, found the text 'x1'"),
    ({"street2": {"lines": [{"n": 1}, {"n": "two"}]}}, "field street2.lines[1].n: expected INT, found the text 'two'"),
    ({"prices": {"EUR": 1, "USD": "x"}}, "field prices['USD']: expected INT, found the text 'x'"),
    ({"odd name": []}, "field 'odd name': expected INT, found a list"),
    ({"id": None}, "field id: expected STRING NOT NULL, found null"),
    ({"buyer": {}}, "field buyer.name: expected STRING NOT NULL, found no such field"),
    ({"buyer": {"name": "ann", "home": {"zip": None}}}, "field buyer.home.zip: expected INT NOT NULL, found null"),
    ({"items": [{"sku": "a"}, {"n": 1}]}, "field items[1].sku: expected STRING NOT NULL, found no such field"),
    ({"stock": {"a": [{"n": 1}], "b": [{}]}}, "field stock['b'][0].n: expected INT NOT NULL, found no such field"),
]
FITTING: list[dict[str, Any]] = [
    {"tiny": 255, "qty": 0, "total": 9223372036854775807, "price": 19.990000000000006, "ratio": 1, "paid": False},
    {
        "price": "001.500",
        "sums": [{"net": 1.50}, {"net": None}],
        "rates": {"EUR": 1e1},
        "huge": 1.2345678901234567890123,
    },
    {"price": "1.50", "ratio": 1e300, "at": "2026-11-22T08:00:00Z", "day": "2026-11-22", "raw": "aGk="},
    {"tags": ["a", 1, {}], "street2": {"zip": None, "lines": [None, {"n": 1}]}, "prices": {"a": None}, "odd name": 1},
    {"sum": 12345678.910000011},  # five float errors of such a number
    {"sum": 99999999999.20003},
    {"qty": None, "unknown": "x", "id": 5},
    {"buyer": {"name": "ann"}, "items": [], "stock": {}},
    {"buyer": None, "items": [None, {"sku": "a"}], "stock": {"a": None, "b": [None, {"n": 1}]}},
]


def _payload(fields: dict[str, Any]) -> bytes:
    return json.dumps({"id": "a"} | fields).encode()


@pytest.mark.parametrize(("fields", "detail"), MISMATCHES)
def test_the_detail_names_the_field_what_was_expected_and_found(fields: dict[str, Any], detail: str) -> None:
    """Broken: a producer's mistake is found by comparing whole payloads with all columns by hand."""
    assert explain_mismatch(_payload(fields), COLUMNS) == detail


def test_spark_and_the_explanation_agree(spark: SparkSession) -> None:
    """Broken: Spark rejects an event for another field than the detail names, or for one that the explanation finds right."""
    fields = [*(fields for fields, _ in MISMATCHES), *FITTING]
    rows = [(None, _payload(one), "s", 0, str(number), None, [(ID, b"x")]) for number, one in enumerate(fields)]
    checked = SourceView(COLUMNS).check(spark.createDataFrame(rows, RAW))
    rejected = {int(row["offset"]) for row in checked.where(f.col(FAILED_CHECK).isNotNull()).collect()}
    assert rejected == set(range(len(MISMATCHES)))
    assert {explain_mismatch(_payload(one), COLUMNS) for one in FITTING} == {
        "a field does not fit the stream's columns"
    }


@pytest.mark.parametrize(
    ("payload", "detail"),
    [
        (b"not json", "the payload is not valid JSON: Expecting value at character 1"),
        (b'{"qty": NaN}', "the payload is not valid JSON: NaN is no JSON number"),
        (b"[1]", "the payload is not a JSON object, found a list"),
        (b'{"qty": 1}', "field id: expected STRING NOT NULL, found no such field"),
        (b"[" * 100_000, "the payload is nested too deeply"),
        (b'{"qty": ' + b"9" * 10_000 + b"}", f"field qty: expected INT, found the number {'9' * 40}…"),
        (
            json.dumps({"qty": "Bearer abcdef \n" + "x" * 99}).encode(),
            f"field qty: expected INT, found the text '*** \N{REPLACEMENT CHARACTER}{'x' * 35}…'",
        ),
    ],
)
def test_what_is_no_field(payload: bytes, detail: str) -> None:
    """Broken: an explanation fails on a payload, or shows a secret, a whole payload, or a control character."""
    assert explain_mismatch(payload, COLUMNS) == detail


def test_one_cause_per_field() -> None:
    """Broken: thousands of events with one mistake are thousands of causes, or two fields are one cause."""

    def details() -> Iterator[str]:
        for number in range(20):
            yield explain_mismatch(_payload({"qty": f"x{number}"}), COLUMNS)
            yield explain_mismatch(_payload({"street2": {"zip": f"a 'quoted' {number}"}}), COLUMNS)
            yield explain_mismatch(_payload({"street2": {"lines": [{}] * number + [{"n": 2**40 + number}]}}), COLUMNS)
            yield explain_mismatch(_payload({"prices": {f"k{number}": []}}), COLUMNS)

    assert {normalise(detail) for detail in details()} == {
        "field qty: expected INT, found the text '…'",
        "field street2.zip: expected INT, found the text '…'",
        "field street2.lines[].n: expected INT, found the number #",
        "field prices[]: expected INT, found a list",
    }
