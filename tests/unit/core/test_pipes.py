"""The pipe file: each mistake is named with file, line and key, all at once; what it implies is derived in one place."""

import json
from pathlib import Path
from typing import Any

import pytest

from services.core.pipe_file.pipes import PipeFile, load_pipes, needs_retrier, pipe_version, read_what_is_right
from services.core.pipe_file.stream import NO_SINGLE_FIELD
from services.core.pipe_file.topic_names import dead_letter_topic, delivery_group, delivery_topics, output_topic
from services.core.yaml_source import BadConfiguration

GOOD = """\
version: 1
streams:
  flights: {partitions: 4, retention: 7d, id: id, key: carrier, time: time}
  weather: {}
pipes:
  late:
    sources: [flights, weather]
    transform: {sql: SELECT * FROM flights}
    destinations:
      - name: ops
        webhook: {url: "https://example.org/hook", secret: {env: OPS_SECRET}, timeout: 5s}
      - name: copy
        webhook: {url: "https://example.org/copy"}
  raw:
    sources: [flights]
    destinations:
      - {name: mirror, stream: weather}
"""


def mistakes(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "pipes.yaml"
    file.write_text(text)
    with pytest.raises(BadConfiguration) as caught:
        load_pipes(file)
    return [str(problem).removeprefix(f"{file}:") for problem in caught.value.problems]


def good(tmp_path: Path) -> PipeFile:
    file = tmp_path / "pipes.yaml"
    file.write_text(GOOD)
    return load_pipes(file)


def test_a_good_file(tmp_path: Path) -> None:
    """Broken: units, defaults or names are read differently from what the documentation says."""
    pipes = good(tmp_path)
    assert pipes.streams["flights"].retention == 604_800
    assert pipes.streams["weather"].partitions == 4
    first = pipes.pipes["late"].destinations[0]
    assert first.webhook is not None
    assert (first.webhook.timeout, first.webhook.body, first.webhook.batch.max_events) == (5.0, "cloudevents", 100)
    assert len(first.webhook.schedule) + 1 == 10
    assert 74 * 3600 < sum(first.webhook.schedule) < 76 * 3600
    assert needs_retrier(pipes)


OUTPUTS = """\
    transform:
      sql: SELECT * FROM flights
      outputs: {long: {where: distance > 2000, renamed_from: far}, all: {}}
"""


def test_outputs_and_who_gets_them(tmp_path: Path) -> None:
    """Broken: a misspelt output is found by nobody, and its destination gets nothing; or an old name changes the version."""
    text = GOOD.replace("    transform: {sql: SELECT * FROM flights}\n", OUTPUTS)
    text = text.replace("- name: ops", "- name: ops\n        from: long")
    (tmp_path / "pipes.yaml").write_text(text)
    late = load_pipes(tmp_path / "pipes.yaml").pipes["late"]
    assert late.transform is not None
    assert [one.output for one in late.destinations] == ["long", None]
    assert (late.transform.outputs["long"].where, late.transform.outputs["all"].where) == ("distance > 2000", None)
    (tmp_path / "pipes.yaml").write_text(text.replace(", renamed_from: far", ""))
    assert pipe_version(load_pipes(tmp_path / "pipes.yaml").pipes["late"]) == pipe_version(late)

    bad = text.replace("from: long", "from: lang").replace("renamed_from: far", "renamed_from: all")
    bad = bad.replace("stream: weather", "stream: weather, from: all")
    assert mistakes(tmp_path, bad) == [
        "13: pipes.late.destinations[ops].from: 'lang' is not among the outputs of its transform: long, all",
        (
            "10: pipes.late.transform.outputs.long.renamed_from: 'all' is still an output of this transform. "
            "Try: its former name, or no renamed_from"
        ),
        (
            "20: pipes.raw.destinations[mirror].from: 'all': the pipe's transform has no outputs. "
            "Try: outputs: {all: {where: …}} there"
        ),
    ]


def test_names_that_are_implied(tmp_path: Path) -> None:
    """Broken: Spark writes to a topic that expel does not read, and events wait for ever."""
    pipes = good(tmp_path)
    assert delivery_topics("late", pipes.pipes["late"]) == [output_topic("late")] == ["late.out"]
    assert delivery_topics("raw", pipes.pipes["raw"]) == ["flights"]
    assert (dead_letter_topic("late"), delivery_group("late", "ops")) == ("late.dead", "late.ops")


def test_every_mistake_at_once(tmp_path: Path) -> None:
    """Broken: an operator meets the mistakes one start at a time, or is sent to the wrong line."""
    text = GOOD.replace("partitions: 4", "partitions: 0").replace("timeout: 5s", "timeout: 5, acks: 1")
    text = text.replace("stream: weather", "strem: weather").replace("weather: {}", "Weather: {}")
    text = text.replace("{sql: SELECT * FROM flights}", "{sql: SELECT 1, python: a.py:f}")
    assert mistakes(tmp_path, text) == [
        "3: streams.flights.partitions: must be at least 1",
        "4: streams.Weather: must match ^[a-z0-9][a-z0-9_-]{0,62}$",
        "8: pipes.late.transform: exactly one of sql and python is needed",
        "11: pipes.late.destinations[ops].webhook.timeout: a duration with a unit is needed (ms, s, m, h, d). Try: 10s or 7d",
        "11: pipes.late.destinations[ops].webhook.acks: unknown key",
        "17: pipes.raw.destinations[mirror].strem: unknown key; did you mean stream?",
        "7: pipes.late.sources.1: 'weather' is not among streams: Weather, flights",
        "17: pipes.raw.destinations[mirror].stream: 'weather' is not among streams: Weather, flights",
    ]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("5", [": a text is needed, or keys and values are needed"]),
        ("{header: 5}", [".header: a text is needed"]),
        ("{hedaer: x}", [".hedaer: unknown key; did you mean header?"]),
    ],
)
def test_a_mistake_in_a_place_is_named_by_its_key(tmp_path: Path, place: str, expected: list[str]) -> None:
    """Broken: the key has the name of a Python function, or keys are asked to be a text."""
    found = mistakes(tmp_path, GOOD.replace("weather: {}", f"weather: {{topic: erp.Weather, id: {place}}}"))
    assert [one for one in found if ".id" in one] == [f"4: streams.weather.id{text}" for text in expected]


def test_what_is_right_is_read_beside_a_mistake(tmp_path: Path) -> None:
    """Broken: one mistake hides another until the next run, or a place in the file is named by the wrong index."""
    text = GOOD.replace("id: id", "id: 5").replace("timeout: 5s", "timeot: 5s, acks: 1, auth: {}")
    text = text.replace("- name: copy\n", "- nam: copy\n").replace("sources: [flights]", "sources: x")
    (tmp_path / "pipes.yaml").write_text(text)
    _, file, problems = read_what_is_right(tmp_path / "pipes.yaml")
    assert file is not None
    assert len(problems) == 6
    flights, late = file.streams["flights"], file.pipes["late"]
    assert (flights.id, flights.key, list(file.pipes)) == (None, "carrier", ["late"])
    assert [one.name for one in late.destinations] == ["ops", "copy"]
    webhook = late.destinations[0].webhook
    assert webhook is not None
    assert (webhook.timeout, webhook.auth, webhook.secret is not None) == (5.0, None, True)
    (tmp_path / "pipes.yaml").write_text("streams: 5\n")
    assert read_what_is_right(tmp_path / "pipes.yaml")[1] is None


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("streams:", "stream:", "2: stream: unknown key; did you mean streams?"),
        (
            "    sources: [flights]\n",
            "    source: [flights]\n",
            "18: pipes.raw.source: unknown key; did you mean sources?",
        ),
        ("    outputs:", "    output:", "10: pipes.late.transform.output: unknown key; did you mean outputs?"),
        ("{name: mirror,", "{nam: mirror,", "20: pipes.raw.destinations.0.nam: unknown key; did you mean name?"),
    ],
)
def test_a_misspelled_key_is_one_mistake(tmp_path: Path, old: str, new: str, expected: str) -> None:
    """Broken: an operator reads three mistakes, two of which are consequences of the first."""
    text = GOOD.replace("    transform: {sql: SELECT * FROM flights}\n", OUTPUTS).replace(
        "name: ops", "name: ops\n        from: long"
    )
    assert text.count(old) == 1
    assert mistakes(tmp_path, text.replace(old, new)) == [expected]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("sources: [flights]", "sources: [fligths]", "fligths"),
        ("sources: [flights]", "sources: [flights, flights]", "occurs twice"),
        ("stream: weather", "stream: flights", "a loop"),
        ("stream: weather", "stream: elsewhere", "elsewhere"),
        ("name: copy", "name: ops", "'ops' occurs twice"),
        ("sources: [flights]", "sources: []", "at least 1 entries"),
        ("retention: 7d", "retention: -7d", "a duration with a unit is needed"),
        ("retention: 7d", "retention: 7", "a duration with a unit is needed"),
        ("id: id", "id: meta..id", "a field name"),
        ("version: 1", "version: 0", "must be 1"),
        ("version: 1", "version: 2", "format 2, written by a newer Penstock"),
        ("timeout: 5s", "order: device", "order: must be 'none' or 'key'; the key is the stream's `key`"),
        ("name: mirror", "name: ../mirror", "must match"),
        ("flights: {", "'fli ghts': {", "must match"),
        ("secret: {env: OPS_SECRET}", "secret: {}", "exactly one of file and env"),
        ("secret: {env: OPS_SECRET}", "secret: {env: lower}", "must match"),
        ("timeout: 5s", "schedule: [5s, 8d]", "at most 7d"),
        ("timeout: 5s", "schedule: [5]", "a duration with a unit is needed"),
        ("timeout: 5s", f"schedule: [{'1s, ' * 33}]", "at most 32 entries"),
        ("  raw:", "  penstock:", "'penstock' is reserved"),
        (
            "{sql: SELECT * FROM flights}",
            "{python: a.py:f, mode: real-time}",
            "exclude each other: Spark runs only SQL there. Try: mode: micro-batch, or the transform without python",
        ),
        (
            "{sql: SELECT * FROM flights}",
            "{sql: SELECT * FROM flights, mode: real-time, deduplicate_within: 1h}",
            "deduplicate_within and mode: real-time exclude each other: Spark keeps no ids of former events there. Try: mode",
        ),
        (
            "{sql: SELECT * FROM flights}",
            "{sql: SELECT * FROM flights, mode: real-time, watermark: 1m}",
            "watermark and mode: real-time exclude each other: Spark takes each event by itself there. Try: mode: micro-batch",
        ),
    ],
)
def test_one_mistake(tmp_path: Path, old: str, new: str, expected: str) -> None:
    """Broken: a pipe that cannot work starts and loses or misroutes events."""
    assert GOOD.count(old) == 1
    found = mistakes(tmp_path, GOOD.replace(old, new))
    assert expected in found[0]
    line = next(number for number, text in enumerate(GOOD.splitlines(), start=1) if old in text)
    assert found[0].split(":")[0] == str(line)


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("5", "id: a text is needed, or keys and values are needed"),
        ("meta..id", "id: a field name is needed; nested fields are joined by dots. Try: id or meta.id"),
        ("{header: 5}", "id.header: a text is needed"),
        ("{}", "id.header: is required"),
        ("[id, state]", f"id: is one field, not a list: several are not combined. Try: {NO_SINGLE_FIELD}"),
    ],
)
def test_a_value_that_fits_none_of_several_forms_is_one_mistake(tmp_path: Path, place: str, expected: str) -> None:
    """Broken: an operator reads a mistake for each form that the value might have, with names from the code."""
    assert mistakes(tmp_path, GOOD.replace("id: id", f"id: {place}")) == [f"3: streams.flights.{expected}"]


def test_a_secret_is_never_shown(tmp_path: Path) -> None:
    """Broken: a secret that was written into the pipe file by mistake is printed to terminals and logs."""
    for wrong in ("whsec_aHVudGVyMg==", "aHVudGVyMg", "[aHVudGVyMg]", "12345678"):
        found = mistakes(tmp_path, GOOD.replace("{env: OPS_SECRET}", wrong))
        assert len(found) == 1
        assert found[0].endswith(
            "webhook.secret: the secret itself must not be here, only its place. "
            "Try: {file: webhook.secret} or {env: WEBHOOK_SECRET}"
        )
    for wrong in ("{whsec_aHVudGVyMg: 1}", "{value: aHVudGVyMg}", "{file: [aHVudGVyMg]}", "{env: whsec_aHVudGVyMg}"):
        found = mistakes(tmp_path, GOOD.replace("{env: OPS_SECRET}", wrong))
        assert found
        assert "aHVudGVyMg" not in "".join(found)
        assert "pydantic" not in "".join(found).lower()


def test_empty_file(tmp_path: Path) -> None:
    """Broken: an empty file gives a page of "is required" instead of what to do."""
    assert mistakes(tmp_path, "") == ["1: is empty. Try: penstock init"]


TABLES = """\
tables:
  names: {parquet: names, columns: "code STRING"}
  prices:
    jdbc: {url: "URL", query: SELECT 1, user: reader, password: {file: database.secret}}
    columns: "sku STRING"
"""
WITH_TABLES = GOOD.replace("{sql: SELECT * FROM flights}", "{tables: [LIST], sql: SELECT * FROM flights}") + TABLES


@pytest.mark.parametrize(
    ("named", "url", "expected"),
    [
        (
            "names, nam",
            "jdbc:postgresql://db/shop",
            "pipes.late.transform.tables.1: 'nam' is not among tables: names, pri",
        ),
        ("names, names", "jdbc:postgresql://db/shop", "pipes.late.transform.tables.1: 'names' occurs twice"),
        ("weather", "jdbc:postgresql://db/shop", "pipes.late.transform.tables.0: 'weather' is a source of this pipe"),
        ("names", "jdbc:mysql://db/shop", "tables.prices.jdbc.url: a URL of PostgreSQL is needed"),
        (
            "names",
            "jdbc:postgresql://u:hush@db/shop",
            "tables.prices.jdbc.url: user and password must not be in the URL",
        ),
        (
            "names",
            "jdbc:postgresql://db/shop?ssl=true&Password=hush",
            "tables.prices.jdbc.url: user and password must not",
        ),
        (
            "names",
            "jdbc:postgresql://db/shop?sslmode=require#&sslpassword=hush",
            "tables.prices.jdbc.url: sslpassword must not be in the URL. Try: sslkey=",
        ),
        (
            "names",
            "jdbc:postgresql://db/shop?sslmode=require&socketFactoryArg=hush&%70assword=hush&hush",
            "tables.prices.jdbc.url: the URL has options that are not known here: socketFactoryArg, …, …. Try: ssl, sslmode",
        ),
    ],
)
def test_mistakes_in_tables(tmp_path: Path, named: str, url: str, expected: str) -> None:
    """Broken: a transform starts without its table, or two views have one name, or a message shows a password."""
    text = WITH_TABLES.replace("LIST", named).replace("URL", url)
    if named == "weather":
        text = text.replace("  names: {parquet", "  weather: {parquet")
    found = mistakes(tmp_path, text)
    assert [expected in one for one in found].count(True) == 1, found
    assert not [one for one in found if "hush" in one]


@pytest.mark.parametrize(
    ("place", "expected"),
    [("s3://bucket/names", "Try: s3a://bucket"), ("s3a://key:hush@bucket/names", "credentials must not be in the URI")],
)
def test_a_place_of_parquet(tmp_path: Path, place: str, expected: str) -> None:
    """Broken: a key is shown in a message, or a place that Spark cannot read shows only when the pipe runs."""
    text = WITH_TABLES.replace("LIST", "names").replace("URL", "jdbc:postgresql://db/shop")
    (found,) = mistakes(tmp_path, text.replace("parquet: names", f'parquet: "{place}"'))
    assert "tables.names.parquet" in found
    assert expected in found
    assert "hush" not in found


def test_a_database_url_has_options(tmp_path: Path) -> None:
    """Broken: a connection cannot be encrypted, or told how long to wait."""
    url = "jdbc:postgresql://db:5432/shop?sslmode=verify-full&sslrootcert=/etc/ca.pem&currentSchema=shop"
    text = WITH_TABLES.replace("LIST", "names").replace("URL", url)
    (tmp_path / "pipes.yaml").write_text(text)
    found = load_pipes(tmp_path / "pipes.yaml").tables["prices"].jdbc
    assert found is not None
    assert found.url == url


def test_a_table_has_one_place(tmp_path: Path) -> None:
    """Broken: a table with a file and a query is read from one of them, and nobody knows from which."""
    text = WITH_TABLES.replace("LIST", "names").replace("parquet: names, ", "")
    assert (
        "exactly one of parquet and jdbc is needed"
        in mistakes(tmp_path, text.replace("URL", "jdbc:postgresql://db/shop"))[0]
    )


def test_loop_over_several_pipes(tmp_path: Path) -> None:
    """Broken: two pipes feed each other, and one event becomes endlessly many."""
    text = GOOD + "  back:\n    sources: [weather]\n    destinations:\n      - {name: again, stream: flights}\n"
    assert mistakes(tmp_path, text) == [
        "21: pipes.back.destinations[again].stream: 'flights' leads back to the pipe's own source: a loop"
    ]


@pytest.mark.parametrize(
    "text", ["streams: 5", "pipes: [x]", "streams: {a: {}}\npipes: {p: {sources: 1, destinations: x}}"]
)
def test_other_shapes(tmp_path: Path, text: str) -> None:
    """Broken: a file of another shape gives a traceback."""
    assert mistakes(tmp_path, text + "\n")


_ON_SECOND = {
    "brokers": {"second": "log:///tmp/second"},
    "streams": {"orders": {"on": "second"}},
    "pipes": {"p": {"sources": ["orders"], "destinations": [{"name": "d", "webhook": {"url": "https://x.example/"}}]}},
}


def _with(changes: dict[str, Any]) -> str:
    return json.dumps(_ON_SECOND | changes)


def test_a_stream_lives_on_a_named_broker(tmp_path: Path) -> None:
    """Without `on` it is the fleet's own."""
    path = tmp_path / "pipes.yaml"
    path.write_text(_with({"streams": {"orders": {"on": "second"}, "here": {}, "too": {"on": "default"}}}))
    found = load_pipes(path)
    assert [stream.home for stream in found.streams.values()] == ["second", "default", "default"]


@pytest.mark.parametrize(
    ("changes", "key", "text"),
    [
        ({"streams": {"orders": {"on": "third"}}}, "streams.orders.on", "is not among brokers: default, second"),
        ({"brokers": {"default": "log:///x", "second": "log:///y"}}, "brokers.default", "the fleet's own broker"),
        ({"brokers": {"second": "kafka://me:hunter2@host:9092"}}, "brokers.second", "no user or password"),
        (
            {"brokers": {"kin": "kinesis://eu-west-1"}, "streams": {"s": {"on": "kin", "compact": True}}, "pipes": {}},
            "streams.s.compact",
            "kin is Kinesis, which keeps no event",
        ),
        ({"brokers": {"second": "log://relative"}}, "brokers.second", "must be absolute"),
        (
            {"streams": {"orders": {"topic": "t", "on": "second"}}},
            "streams.orders.on",
            "an embedded log, which has no topics of others",
        ),
        (
            {
                "pipes": {
                    "p": {"sources": ["orders"], "destinations": [{"name": "d", "topic": {"name": "t", "on": "x"}}]}
                }
            },
            "pipes.p.destinations[d].topic.on",
            "'x' is not among brokers: default, second",
        ),
        (
            {
                "brokers": {"second": "kinesis://eu-west-1"},
                "pipes": {
                    "p": {
                        "sources": ["orders"],
                        "destinations": [{"name": "d", "topic": {"name": "t", "on": "second"}}],
                    }
                },
            },
            "pipes.p.destinations[d].topic.on",
            "Kinesis, which has no topics of others",
        ),
        (
            {
                "pipes": {
                    "p": {
                        "sources": ["orders"],
                        "transform": {"sql": "SELECT event FROM orders"},
                        "destinations": [{"name": "d", "webhook": {"url": "https://x.example/"}}],
                    }
                }
            },
            "pipes.p.sources.0",
            "A transform reads on the fleet's own broker only",
        ),
    ],
)
def test_a_wrong_broker_is_named(tmp_path: Path, changes: dict[str, Any], key: str, text: str) -> None:
    """Otherwise the stream would silently live elsewhere, or a query would find no topic."""
    path = tmp_path / "pipes.yaml"
    path.write_text(_with(changes))
    with pytest.raises(BadConfiguration) as found:
        load_pipes(path)
    assert any(problem.key == key and text in problem.message for problem in found.value.problems), found.value
    assert "hunter2" not in str(found.value)
