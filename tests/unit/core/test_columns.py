"""Mistakes in `columns` that show without Spark. tests/spark/test_preparation.py compares with Spark."""

from pathlib import Path

import pytest

from services.core.pipe_file.columns import find_column_mistakes
from services.core.yaml_source import BadConfiguration
from services.fleet.pipes.check import check_pipe_file

MISTAKES = {
    "id STRNG NOT NULL": ["field id: there is no type STRNG; did you mean STRING?"],
    "a INT, b ARRAY<STRUCT<c: TEXT, d MAP<STRING, DOBLE>>>": [
        "field b[].c: there is no type TEXT; did you mean STRING?",
        "field b[].d[…]: there is no type DOBLE; did you mean DOUBLE?",
    ],
    "a MONEY": ["field a: there is no type MONEY; did you mean DECIMAL(12,2)?"],
    "a DECIMAL(40, 2)": ["field a: a DECIMAL has at most 38 digits, not 40"],
    "id STRING, sensor STRUCT<id STRING, celsius DUBLE": ["a `>` is missing: sensor STRUCT<…"],
    "a ARRAY<STRUCT<b: INT>, c INT": ["a `>` is missing: a ARRAY<…"],
    "a ARRAY<STRUCT<b: INT, c INT>": ["a `>` is missing: a ARRAY<…"],
    "a MAP<STRING, DECIMAL(3,1>": ["a `)` is missing: DECIMAL(…"],
    "a ARRAY<INT>>, b INT": ["one `>` too many: INT >>"],
    "a, b INT": ["field a has no type. Try: a STRING"],
    "Event STRING": ["the column name 'event' is reserved. Try: another name, read by a transform from `value`"],
    "a INT, A STRING": ["the column 'a' is declared twice (names are the same in upper and lower case)"],
}
RIGHT = (
    "a INT NOT NULL COMMENT 'x, y', b STRUCT<event: DECIMAL(3,1) NOT NULL, c MAP<STRING, ARRAY<INT>>>, `a b` STRING -- STRNG",
    "a STRING COLLATE UTF8_LCASE, b INTERVAL DAY TO SECOND, c CHAR(3), d TIMESTAMP WITHOUT TIME ZONE, e VARIANT, f TIME(3)",
    r"a STRUCT<b INT COMMENT 'it\'s < 5', c INT>, `a <` INT",
    "a: INT, b: REAL, c STRUCT<>, d NUMERIC, e DEC(3), event_time TIMESTAMP",
)
NOT_KNOWN = ("a-b INT", "a INT()", "struct<a: int>", "")


def test_mistakes_are_named() -> None:
    """Broken: a misspelled type shows itself only when Spark has started, without the type that is meant."""
    assert {ddl: find_column_mistakes(ddl, timed=False) for ddl in MISTAKES} == MISTAKES
    assert find_column_mistakes("event_time TIMESTAMP", timed=True)


def test_what_spark_takes_is_no_mistake() -> None:
    """Broken: a pipe file that works is refused."""
    assert [one for ddl in (*RIGHT, *NOT_KNOWN) for one in find_column_mistakes(ddl, timed=False)] == []


def test_check_names_them_with_their_line(tmp_path: Path) -> None:
    """Broken: `penstock check` says that a file is good whose transform does not start."""
    file = tmp_path / "pipes.yaml"
    file.write_text(
        "streams:\n  s: {columns: event_time STRNG}\n"
        "tables:\n  t: {parquet: t, columns: a TEXT}\n"
        "pipes:\n  p:\n    sources: [s]\n    transform: {sql: 'SELECT event, value FROM s', watermark: 1m}\n"
        "    destinations: [{name: d, webhook: {url: 'https://example.org/'}}]\n"
    )
    with pytest.raises(BadConfiguration) as caught:
        check_pipe_file(file)
    assert [str(one).removeprefix(f"{file}:") for one in caught.value.problems] == [
        "2: streams.s.columns: field event_time: there is no type STRNG; did you mean STRING?",
        "2: streams.s.columns: the column name 'event_time' is reserved. Try: another name, read by a transform from `value`",
        "4: tables.t.columns: field a: there is no type TEXT; did you mean STRING?",
    ]
