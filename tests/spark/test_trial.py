"""`penstock try` with Spark: outputs and dead letters are those of a running pipe, and nothing is stored."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest
from pyarrow import parquet
from pyspark.sql import SparkSession

from services.core.aws_emulator import CREDENTIALS, REGION
from services.core.event import read_id
from services.core.sample import SampleRecord, TrialResult, UndeclaredField
from services.core.undelivered.dead_letter import DETAIL, REASON, SOURCE
from services.core.yaml_source import BadConfiguration
from services.fleet.pipes.trial import run_transform
from spark.jobs.culprits import ALL_FAILED
from spark.trial import TrialSettings, try_pipe
from tests.spark.log_pipeline import LogPipeline, event
from tests.support.object_store import BUCKET, ObjectStoreServer

Try = Callable[..., TrialResult]
ROWS = [b'{"n": 4}', b'{"n": 5}', b'{"n": "x"}', b'{"n": 6}', b"\xff"]


@pytest.fixture
def try_it(spark: SparkSession, pipeline: LogPipeline, tmp_path: Path) -> Try:
    """Tries a pipe on records of the stream `s`, by their payloads."""

    def run(values: Iterable[bytes], **pipe: object) -> TrialResult:
        records = [
            SampleRecord(f"f:{number}", "s", number % 2, str(number), event(number % 40, value))
            for number, value in enumerate(values)
        ]
        (tmp_path / "sample").write_bytes(msgspec.msgpack.encode(records))
        settings = TrialSettings(pipes=tmp_path / "pipes.yaml", data=tmp_path / "data", sample=tmp_path / "sample")
        return try_pipe(spark, settings, pipeline.pipe(**{"columns": "n INT", **pipe}), 1_000_000)  # type: ignore[arg-type]

    return run


def test_results_are_those_of_a_running_pipe(try_it: Try, pipeline: LogPipeline) -> None:
    """If this fails, a trial promises another result than the pipe then has, or changes the broker."""
    transform = {"sql": "SELECT event, 10 DIV (n - 5) AS x FROM s WHERE n < 6"}
    result = try_it(ROWS, **transform)
    assert not pipeline.out
    pipeline.send(event(number, value) for number, value in enumerate(ROWS))
    pipeline.run(pipeline.pipe(columns="n INT", **transform), len(ROWS))
    assert [(read_id(one), one.value) for one in result.outputs] == [(read_id(one), one.value) for one in pipeline.out]
    live = sorted((read_id(one), one.header(REASON), one.header(DETAIL)) for one in pipeline.dead)
    assert sorted((read_id(one), one.header(REASON), one.header(DETAIL)) for one in result.dead) == live
    assert [reason for _, reason, _ in live] == [b"transform_error", b"schema_mismatch", b"bad_record"]
    assert {one.header(SOURCE) for one in result.dead} == {b"s:1:1", b"s:0:2", b"s:0:4"}
    assert (result.keeps_events, result.row_by_row, result.broken) == (True, True, "")


def test_fields_that_get_lost_are_named(try_it: Try) -> None:
    """If this fails, a receiver lacks what the sender sent, and nobody learns it before the receiver notices."""
    payloads = [b'{"n": 1, "items": [{"sku": "a", "qty": 2}], "note": {"by": 1}}', b'{"n": 2, "N": 3}', b"[]"]
    columns = "n INT, items ARRAY<STRUCT<sku: STRING>>"
    lost = try_it(payloads, sql="SELECT event, n, items FROM s", columns=columns).undeclared
    assert lost == [UndeclaredField("s", name, 1, 3) for name in ("items[].qty", "note", "N")]
    assert not try_it(payloads, sql="SELECT event, value FROM s", columns=columns).undeclared
    named = try_it(
        payloads, sql="SELECT event, n, items, get_json_object(value, '$.note') AS note FROM s", columns=columns
    ).undeclared
    assert [one.field for one in named] == ["items[].qty", "N"]
    dropped = "SELECT event, n, items, get_json_object(value, '$.note') AS note FROM s WHERE n > 9"
    assert try_it(payloads, sql=dropped, columns=columns).undeclared == named
    assert not try_it(payloads, sql="SELECT event, value FROM s WHERE n > 9", columns=columns).undeclared


def test_the_page_keeps_the_rest(try_it: Try) -> None:
    """If this fails, the page's way to add a field loses another one, or fails on an event that has the field already."""
    page = (Path(__file__).parents[2] / "docs" / "transforms.md").read_text().partition("### Keep the rest")[2]
    sql = page.partition("```sql\n")[2].partition("```")[0].replace("FROM orders", "FROM s")
    shown = re.findall(r'`({"id".*?})`', page)[:2]
    payloads = [shown[0], '{"amount": 100, "vat": 1, "time": null}', '{"amount": 99}']
    result = try_it([one.encode() for one in payloads], sql=sql, columns="amount DOUBLE")
    assert [(one.value or b"").decode() for one in result.outputs] == [
        shown[1],
        '{"amount":100,"time":null,"vat":19.0,"checked":true}',
    ]
    assert not result.dead
    assert not result.undeclared


def test_results_over_several_events(try_it: Try) -> None:
    """If this fails, a trial shows no result of an aggregate, or hides why it cannot run on a stream."""
    sql = "SELECT string(n % 2) AS id, count(*) AS events FROM s GROUP BY n % 2, window(event_time, '1 hour')"
    result = try_it([b'{"n": %d}' % number for number in range(5)], sql=sql, watermark="1m")
    assert {(read_id(one), one.value) for one in result.outputs} == {("0", b'{"events":3}'), ("1", b'{"events":2}')}
    assert (result.keeps_events, result.row_by_row, result.gives_times) == (False, False, False)
    with pytest.raises(BadConfiguration, match=r"cannot run on a stream.*watermark: 10m"):
        try_it([], sql="SELECT string(n) AS id, count(*) AS events FROM s GROUP BY n")


def test_the_page_shows_what_a_window_returns(try_it: Try) -> None:
    """If this fails, the payload beside the page's window is not what a receiver gets."""
    page = (Path(__file__).parents[2] / "docs" / "transforms.md").read_text().partition("### Windows")[2]
    sql = page.partition("sql: |\n")[2].partition("```")[0].replace("FROM flights", "FROM s")
    shown = re.findall(r"`({.*?})`", page)[:2]
    short = sql.replace("AS time, carrier,", "AS time,")
    assert short != sql
    for text, payload in ((sql, shown[0]), (short, shown[1])):
        tried = try_it([b'{"carrier": "UA"}'] * 3, sql=text, watermark="10m", columns="carrier STRING")
        assert tried.gives_times
        (result,) = tried.outputs
        assert (result.key, (result.value or b"").decode()) == (b"UA", payload)


def test_the_page_makes_an_id_of_several_fields(try_it: Try) -> None:
    """If this fails, the page's way to an id of two fields gives another id, or loses the payload or the time."""
    page = (Path(__file__).parents[2] / "docs" / "ingest.md").read_text().partition("### An id of several fields")[2]
    sql = page.partition("```sql\n")[2].partition("```")[0].replace("FROM parcels", "FROM s")
    payload = b'{"parcel": "p-7", "status": "sent", "more": 1}'
    result = try_it([payload], sql=sql, columns="parcel STRING, status STRING")
    (made,) = result.outputs
    sent = event(0, payload)
    assert (read_id(made), made.key, made.value, made.timestamp) == ("p-7-sent", sent.key, payload, sent.timestamp)
    assert (result.keeps_events, result.gives_times) == (False, True)


def test_a_table_in_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If this fails, a table in S3 can only be read where the checkpoints are in S3, too."""
    given = {**CREDENTIALS, "PENSTOCK_TRANSFORM_S3_REGION": REGION, "PENSTOCK_TRANSFORM_S3_PATH_STYLE": "true"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "pipes.yaml").write_text(
        f"""
version: 1
streams: {{s: {{columns: "n INT"}}}}
tables: {{names: {{parquet: "s3a://{BUCKET}/names", columns: "n INT, name STRING"}}}}
pipes:
  p:
    sources: [s]
    transform: {{tables: [names], sql: "SELECT event, name FROM s JOIN names USING (n)"}}
    destinations: [{{name: d, webhook: {{url: "https://example.com/"}}}}]
"""
    )
    parquet.write_table(pa.table({"n": [1], "name": ["one"]}), tmp_path / "names")
    with ObjectStoreServer(tmp_path) as store:
        monkeypatch.setenv("PENSTOCK_TRANSFORM_S3_ENDPOINT", store.url)
        store.client().upload_file(str(tmp_path / "names"), BUCKET, "names/1.parquet")
        records = [SampleRecord(f"f:{n}", "s", 0, str(n), event(n, b'{"n": %d}' % n)) for n in range(3)]
        result = run_transform(tmp_path / "pipes.yaml", "p", records, None)
    assert [one.value for one in result.outputs] == [b'{"name":"one"}']


def test_a_broken_transform_has_no_dead_letters(try_it: Try) -> None:
    """If this fails, a trial says that all events become dead letters, where the pipe would stop; or repeats duplicates."""
    sql = "SELECT event, n DIV 0 AS x FROM s"
    result = try_it([b'{"n": 1}'] * 80, sql=sql, deduplicate_within="1m")
    assert result.duplicates == [f"f:{number}" for number in range(40, 80)]
    assert "DIVIDE_BY_ZERO" in result.broken
    assert not result.dead
    assert ALL_FAILED < 40
