"""`penstock try` without Spark: the sample as ingest would store it, the counts, the refusals."""

import gzip
import json
import re
import time
from pathlib import Path

import msgspec
import pytest

from services.core.broker.connect import open_broker
from services.core.broker.contract import TopicSpec
from services.core.broker.partitioner import choose_partition
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.event import ARRIVAL, ID, OUTPUTS
from services.core.pipe_file.pipes import PipeFile, load_pipes
from services.core.pipe_file.stream import NO_SINGLE_FIELD
from services.core.sample import AbsentField, SampleEvent, SampleRecord, TrialResult, UndeclaredField
from services.core.times import format_time
from services.core.undelivered.dead_letter import make_dead_letter
from services.fleet.pipes import trial
from services.fleet.problem import CommandFailed
from services.fleet.verbs.trial import _counts, _warnings, trial_tables
from services.ingest.sample import make_sample
from services.ingest.settings import IngestSettings
from tests.unit.fleet.conftest import Shell

NOW = 1_700_000_000_000
NO_PIPES = PipeFile.model_validate({"streams": {"s": {}}})
HOOK = "destinations: [{name: d, webhook: {url: 'https://example.org/'}}]"
PIPES = f"""\
streams: {{s: {{id: nr, key: who, time: at}}, u: {{}}}}
pipes:
  one: {{sources: [s], transform: {{sql: 'SELECT event, value FROM s', watermark: 1m}}, {HOOK}}}
  two: {{sources: [s, u], transform: {{sql: 'SELECT s.event, s.value FROM s JOIN u ON s.event.id = u.event.id'}}, {HOOK}}}
  none: {{sources: [s], {HOOK}}}
"""


@pytest.fixture
def pipes(tmp_path: Path) -> PipeFile:
    (tmp_path / "pipes.yaml").write_text(PIPES)
    return load_pipes(tmp_path / "pipes.yaml")


def record(number: int, event_id: str, timestamp: int = NOW) -> SampleRecord:
    stored = Record(None, b"{}", timestamp, ((ID, event_id.encode()), (ARRIVAL, b"%d" % (NOW + number))))
    return SampleRecord(f"f:{number}", "s", 0, str(number), stored)


def dead_letter(one: SampleRecord) -> Record:
    """Of an event on which the transform failed."""
    return make_dead_letter(
        one.record, reason="schema_mismatch", detail="", node="transform", pipe="one", first_failure=NOW,
        source=TopicPartition(one.topic, one.partition), offset=int(one.offset), now_ms=NOW,
    )  # fmt: skip


def test_a_sample_is_stored_as_ingest_would(pipes: PipeFile) -> None:
    """Broken: a trial shows other ids, keys, times or refusals than the running fleet."""
    payloads = [
        b'{"nr": 7, "who": "ann", "at": 1700000000}',
        b'{"nr": []}',
        b'{"nr": "8", "x": NaN}',
        b'{"who": "ann"}',
    ]
    events = [SampleEvent(f"f:{number}", "s", payload) for number, payload in enumerate(payloads, 1)]
    sample = make_sample(events, pipes, IngestSettings().limits, NOW)
    first, last = sample.records
    assert (first.place, first.topic, first.partition) == ("f:1", "s", choose_partition(b"ann", 4))
    assert (first.record.header(ID), first.record.key, first.record.timestamp) == (b"7", b"ann", 1_700_000_000_000)
    assert (first.offset, last.offset, last.partition) == ("0", "1", first.partition)
    assert last.record.header(ID)
    assert [(one.place, one.reason) for one in sample.refused] == [("f:2", "bad-id"), ("f:3", "bad-json")]
    assert sample.absent == [AbsentField("s", "id", "nr", 1, 2), AbsentField("s", "time", "at", 1, 2)]


def test_absent_fields_are_named(pipes: PipeFile) -> None:
    """Broken: a misspelt `id`, or arrival times in place of the events' own, are found out only live."""
    sample = make_sample(
        [SampleEvent("f:1", "s", b"{}"), SampleEvent("f:2", "u", b"{}")], pipes, IngestSettings().limits, NOW
    )
    windowed, plain = (
        trial.sum_up(name, pipes.pipes[name], [], [], TrialResult(), sample.absent) for name in ("one", "two")
    )
    assert windowed.as_json()["absent_fields"][0] == {"stream": "s", "use": "id", "field": "nr", "events": 1, "of": 1}
    notes = [*_warnings(windowed, pipes.pipes["one"])]
    absent = "no field 'nr' for the id in 1 of 1 event of s: they get new ids"
    assert notes[0] == (
        f"{absent}. Try: another field for `id` in the stream. Where no single field names an event: {NO_SINGLE_FIELD}"
    )
    assert notes[1] == (
        "no field 'who' for the key in 1 of 1 event of s: they have no key. Try: another field for `key` in the stream"
    )
    assert (
        notes[-1] == "u has no time field in the pipe file: its events get the time of this trial. Try: --from-stream"
    )
    assert [one.stream for one in plain.absent] == ["s", "s", "s"]


def test_absent_fields_of_stored_events_are_named(pipes: PipeFile) -> None:
    """Broken: a trial on the events of a stream is silent about a misspelt `key`, of which a trial on a file speaks."""
    values = (b'{"nr": 1, "who": "ann", "at": 1}', b'{"who": null, "at": 2}', b"\xff opaque", b"[1]", None)
    stored = [
        SampleRecord(f"s:0:{offset}", "s", 0, str(offset), Record(None, value, NOW, ()))
        for offset, value in enumerate(values)
    ]
    found = trial.find_absent_fields(pipes, stored)
    assert found == [AbsentField("s", "id", "nr", 1, 2), AbsentField("s", "key", "who", 1, 2)]


def test_different_events_of_one_id_are_named(pipes: PipeFile) -> None:
    """Broken: the id names the thing that events are about, and receivers silently drop all events of a thing but its first."""
    payloads = [b'{"nr": 7}', b'{"nr": 8}', b'{"nr": 7}', b'{"nr": 8, "state": "sold"}', b'{"nr": 8, "state": "gone"}']
    events = [SampleEvent(f"f:{number}", "s", payload) for number, payload in enumerate(payloads, 1)]
    events.append(SampleEvent("f:9", "u", b'{"nr": 7, "of": "another stream"}'))
    sample = make_sample(events, pipes, IngestSettings().limits, NOW)
    found = trial.sum_up("two", pipes.pipes["two"], sample.records, [], TrialResult())
    assert found.as_json()["shared_ids"] == ["8"]
    assert found.is_good
    first = next(one for one in sample.records if one.record.value == b'{"nr": 8}')
    second = next(one for one in sample.records if one.record.value == b'{"nr": 8, "state": "sold"}')
    dead = [dead_letter(one) for one in (first, second)]
    corrected = trial.sum_up("two", pipes.pipes["two"], sample.records, [], TrialResult(dead=dead))
    assert corrected.as_json()["shared_ids"] == [], (
        "an event that was corrected and sent again has the id of its dead letter"
    )
    (note,) = [one for one in _warnings(found, pipes.pipes["two"]) if "same id" in one]
    assert note.startswith("different events have the same id, and receivers drop all but the first as duplicates: 8. ")
    assert note.endswith(f"Where no single field names an event: {NO_SINGLE_FIELD}")


def test_fields_that_get_lost_are_named(pipes: PipeFile) -> None:
    """Broken: a person does not learn that receivers lack a field of the sample, or reads the names of a thousand fields."""
    lost = [UndeclaredField("s", f"f{number}", 2, 3) for number in range(10)] + [UndeclaredField("u", "a[].b", 1, 1)]
    found = trial.sum_up("one", pipes.pipes["one"], [], [], TrialResult(undeclared=lost))
    assert found.as_json()["undeclared_fields"][-1] == {"stream": "u", "field": "a[].b", "events": 1, "of": 1}
    first, second = _warnings(found, pipes.pipes["one"])
    assert first.startswith("fields of s that no column declares, and no result has: f0 (2 of 3), f1 (2 of 3), ")
    assert ", f7 (2 of 3) and 2 more. Try: declare them in `columns`, or keep the rest" in first
    assert "of u that no column declares, and no result has: a[].b (1 of 1). Try" in second


def test_what_became_of_each_event_is_counted(pipes: PipeFile) -> None:
    """Broken: an event that the transform drops or doubles is not seen, or an event that may be late."""
    records = [record(0, "a"), record(1, "b", NOW - 59_999), record(2, "c", NOW - 60_000), record(3, "a")]
    outputs = [records[1].record, records[0].record, records[1].record]
    found = trial.sum_up("one", pipes.pipes["one"], records, [], TrialResult(outputs, duplicates=["f:3"]))
    assert [one.header(ID) for one in found.outputs] == [b"a", b"b", b"b"]
    assert (found.filtered, found.repeated, found.late, found.is_good) == (1, ["b"], {"f:2": 60_000}, False)
    new = trial.sum_up("one", pipes.pipes["one"], records, [], TrialResult(outputs[:2], keeps_events=False))
    joined = trial.sum_up("one", pipes.pipes["one"], records, [], TrialResult(outputs[:2], row_by_row=False))
    (live,) = [note for note in _warnings(joined, pipes.pipes["one"]) if note.startswith("live, ")]
    assert "when an event is 1m or more later than the window's end. This sample alone would bring windows" in live
    assert f"that ended by {format_time(NOW - 60_000)} at most" in live
    ahead = record(4, "d", NOW + 3_600_000)
    letter = dead_letter(ahead)
    dead = trial.sum_up("one", pipes.pipes["one"], [*records, ahead], [], TrialResult(dead=[letter], row_by_row=False))
    (live,) = [note for note in _warnings(dead, pipes.pipes["one"]) if note.startswith("live, ")]
    assert f"that ended by {format_time(NOW - 60_000)} at most" in live
    assert (new.filtered, new.repeated, new.is_good) == (None, [], True)
    assert _counts(new, pipes.pipes["one"]) == [
        "4 events in",
        "2 out (new events: from which events they come is not known)",
        "0 dead letters",
    ]
    assert _counts(found, pipes.pipes["one"]) == [
        "4 events in",
        "3 out",
        "1 filtered by the transform",
        "0 dead letters",
    ]
    untimed = msgspec.structs.replace(new.result, gives_times=False)
    (note,) = set(_warnings(trial.sum_up("one", pipes.pipes["one"], [], [], untimed), pipes.pipes["one"]))
    assert note.endswith("the time at which they are computed. To keep the time of an event: event.time AS time")


@pytest.mark.parametrize(
    ("sent", "made", "named"),
    [
        (b'{"parcel": "p7", "status": "sent"}', b'{"id": "p7-sent", "key": "p7-x", "value": "{}"}', ["id", "key"]),
        (b'{"parcel": "p7", "meta": {"nr": 8}}', b'{"id": 8, "key": "p7", "time": "now"}', []),
        (b'{"id": 1}', b'{"id": "1-x"}', []),
        (b"{}", b'{"id": "own-7"}', []),
        (b"{}", b'{"id": null}', []),
        (b"opaque", b"opaque", []),
    ],
)
def test_an_id_that_is_only_a_field_of_the_payload_is_named(
    pipes: PipeFile, sent: bytes, made: bytes, named: list[str]
) -> None:
    """Broken: a query that makes ids beside `event` leaves the ids as they are, and nobody says so."""
    event = record(0, "own-7")
    event = msgspec.structs.replace(event, record=msgspec.structs.replace(event.record, value=sent))
    outputs = [msgspec.structs.replace(event.record, value=made)]
    found = trial.sum_up("two", pipes.pipes["two"], [event], [], TrialResult(outputs))
    assert found.beside == named
    notes = [note for note in _warnings(found, pipes.pipes["two"]) if "beside `event`" in note]
    assert len(notes) == len(named)
    assert all(f"keep their own {name}s" in note for name, note in zip(named, notes, strict=True))
    new = trial.sum_up("two", pipes.pipes["two"], [event], [], TrialResult(outputs, keeps_events=False))
    assert new.beside == []


def test_each_result_shows_its_outputs(pipes: PipeFile) -> None:
    """Broken: nobody sees before a start which destination would get an event."""
    plain = record(0, "a").record
    outputs = [msgspec.structs.replace(plain, headers=(*plain.headers, (OUTPUTS, names))) for names in (b"x,y", b"")]
    found = trial.sum_up("one", pipes.pipes["one"], [], [], TrialResult(outputs, keeps_events=False))
    assert [one["outputs"] for one in found.as_json()["outputs"]] == [["x", "y"], []]
    (table,) = trial_tables(found)
    cells = {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}
    assert cells["outputs"] == ["x, y", "none"]
    assert "outputs" not in trial.output_json(plain)


async def test_the_newest_events_of_a_stream(tmp_path: Path) -> None:
    """Broken: a trial runs on old events, or changes the stream that it reads."""
    url = f"log://{tmp_path}/log"
    async with open_broker(url) as broker, Producer(broker.appender) as producer:
        await broker.admin.create_topic(TopicSpec("s", 2))
        for number in range(10):
            (await producer.send_to("s", {number % 2: [record(number, str(number)).record]})).raise_first()
    found = await trial.read_streams(url, NO_PIPES, ["s"], 3)
    assert [one.place for one in found] == ["s:1:3", "s:0:4", "s:1:4"]
    assert await trial.read_streams(url, NO_PIPES, ["unknown"], 3) == []
    async with open_broker(url) as broker:
        assert await broker.admin.topics() == {"s": 2}


async def test_damaged_records_of_a_stream_are_left_out(tmp_path: Path) -> None:
    """Broken: one altered byte in a stream, and no transform can be tried on the rest of it."""
    url, mark = f"log://{tmp_path}/log", b'{"number": 3}'
    async with open_broker(url) as broker, Producer(broker.appender) as producer:
        await broker.admin.create_topic(TopicSpec("s", 1))
        for number in range(6):
            event = Record(None, b'{"number": %d}' % number, NOW, ((ID, b"%d" % number),))
            (await producer.send_to("s", {0: [event]})).raise_first()
    (file,) = [one for one in (tmp_path / "log").rglob("*.db") if mark in one.read_bytes()]
    file.write_bytes(file.read_bytes().replace(mark, b'{"number": X}'))
    assert [one.offset for one in await trial.read_streams(url, NO_PIPES, ["s"], 100)] == ["0", "1", "2", "4", "5"]


def test_the_place_in_a_file_is_a_line_or_the_number_of_an_event(tmp_path: Path) -> None:
    """Broken: of an array over several lines, the number of an event is taken for a line."""
    lines, array = tmp_path / "lines.ndjson", tmp_path / "array.json"
    lines.write_text('{"nr": 1}\n\n{"nr": 2}\n')
    array.write_text('[\n {"nr": 1},\n {"nr": 2}\n]')
    found = [[one.place for one in trial.read_files({"s": str(file)}).events] for file in (lines, array)]
    assert found == [["lines.ndjson:1", "lines.ndjson:3"], ["array.json, event 1", "array.json, event 2"]]


def test_a_long_file_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a trial takes hours, or leaves out events without a word."""
    monkeypatch.setattr(trial, "MOST_EVENTS", 2)
    for count, cut in ((2, False), (3, True)):
        path = tmp_path / f"{count}.gz"
        path.write_bytes(gzip.compress(b'{"nr": 1}\n' * (count - 1) + b"7"))
        found = trial.read_files({"s": str(path)})
        assert len(found.events) + len(found.refused) == 2
        assert found.cut == ([str(path)] if cut else [])
    assert [(one.place, one.detail) for one in trial.read_files({"s": str(tmp_path / "2.gz")}).refused] == [
        ("2.gz:2", "not a JSON object")
    ]


@pytest.mark.usefixtures("pipes")
def test_what_cannot_be_tried_is_explained(shell: Shell, tmp_path: Path) -> None:
    """Broken: a person does not learn how to name a pipe, a stream or a sample."""
    (tmp_path / "empty").touch()
    (tmp_path / "a=b").write_text('[{"nr": 1}')
    for arguments, words in (
        (["one"], "exactly one of --sample and --from-stream is needed"),
        (["one", "--sample", "empty", "--from-stream", "3"], "exactly one of --sample and --from-stream is needed"),
        (["zero", "--sample", "empty"], "has no pipe zero\n  Try: one of: one, two, none"),
        (["one", "--sample", "empty"], "the sample has no events: empty"),
        (["one", "--sample", "emtpy"], "emtpy cannot be read: No such file or directory; did you mean empty?"),
        (["one", "--sample", "gone"], "gone cannot be read: No such file or directory\n  Try: ls ."),
        (["one", "--sample", "a=b"], "a=b: after event 1: not a valid JSON array"),
        (["two", "--sample", "empty"], "Try: --sample s=FILE --sample u=FILE"),
        (["two", "--sample", "s=empty", "--sample", "s=empty"], "--sample names s twice"),
        (["two", "--sample", "s=-", "--sample", "u=-"], "standard input is one file"),
        (["one", "--from-stream", "3"], "and it holds no log"),
    ):
        assert shell.run("try", *arguments) == 2, arguments
        assert words in shell.err


@pytest.mark.usefixtures("pipes")
def test_a_pipe_without_a_transform_shows_the_fields_that_its_events_lack(shell: Shell, tmp_path: Path) -> None:
    """Broken: a misspelt id or key of a stream that nothing transforms is found by nobody before its receivers."""
    (tmp_path / "sample").write_text(
        '{"nr": 7, "who": "ann", "at": 1700000000}\n{"number": 8, "who": "bob", "at": 1700000000}\n'
    )
    assert shell.run("try", "none", "--sample", "sample") == 0, shell.err
    assert "no field 'nr' for the id in 1 of 2 events of s: they get new ids" in shell.err
    assert "2 events in, 2 out, 0 dead letters" in shell.err
    assert "Spark" not in shell.err
    assert "bob" in shell.out
    (tmp_path / "sample").write_text('{"nr": 7}\n{"nr": 1e400}\n')
    assert shell.run("try", "none", "--sample", "sample", "--json") == 1
    (refused,) = json.loads(shell.out)["refusals"]
    assert (refused["from"], refused["reason"]) == ("sample:2", "bad-json")
    assert refused["detail"] == "The JSON is not valid: number is infinity when parsed as double.", (
        "no other line and column"
    )


def test_a_transform_that_never_ends_is_stopped(
    pipes: PipeFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: a trial hangs for ever, says nothing while it works, or leaves its process and its files behind."""
    monkeypatch.setattr("services.fleet.pipes.spark_child.LIMIT_S", 0.3)
    monkeypatch.setattr("services.fleet.pipes.spark_child.SAY_EVERY_S", 0.1)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    begun = time.monotonic()
    with pytest.raises(CommandFailed, match="the transform of one has not ended"):
        trial.run_transform(tmp_path / "pipes.yaml", "one", [record(0, "a")], None)
    assert time.monotonic() - begun < 60
    assert re.search(r"Spark starts \(\d+ s so far\)", capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == ["pipes.yaml"]
