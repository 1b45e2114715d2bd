"""The command line: help that a person can follow, errors that say what, where and what to try, JSON for programs."""

import gzip
import itertools
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import structlog
from typer.main import get_command

from services.core.pipe_file.stream import NO_SINGLE_FIELD
from services.core.process.settings import variable_name
from services.core.security.keys import load_keys
from services.fleet.access import ingest_url
from services.fleet.cli import load_verbs
from services.fleet.folder import FleetState, write_state
from services.fleet.sending import sender
from services.fleet.sending.event_source import SourceEvent
from services.fleet.up.ports import free_port
from services.fleet.up.settings import UpSettings, keys_of_ingest
from services.fleet.verbs.app import APP
from tests.unit.fleet.conftest import Shell, at_broker


def find_verbs(command: object = None, path: str = "") -> Iterator[str]:
    """Every verb, and every verb of a group as `group verb`."""
    parts = vars(command or get_command(APP)).get("commands", {})
    for name, part in parts.items():
        yield from find_verbs(part, f"{path}{name} ")
    if not parts:
        yield path.strip()


load_verbs([])
VERBS = list(find_verbs())


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(shell: Shell, verb: str) -> None:
    """Broken: a newcomer has to read the source."""
    assert shell.run(*verb.split(), "--help") == 0
    assert f"penstock {verb}" in shell.out.split("Example")[1]


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_no_line_that_ends_early(shell: Shell, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    """Broken: at 80 columns, the lines of the source break in the middle."""
    monkeypatch.setenv("COLUMNS", "80")
    assert shell.run(*verb.split(), "--help") == 0
    lines = [line.strip() for line in shell.out.split("╭")[0].splitlines()]
    for line, after in itertools.pairwise(lines):
        assert not line or not after or len(line) + 1 + len(after.split()[0]) > 78


def test_the_commands_are_in_the_order_of_their_use(shell: Shell) -> None:
    """Broken: a newcomer has to search the first commands among twenty."""
    assert shell.run("--help") == 0
    shown = [line.split()[1] for line in shell.out.splitlines() if re.match(r"│ [a-z]", line)]
    assert shown[:8] == ["demo", "init", "check", "try", "up", "send", "listen", "status"]
    assert set(shown) == {verb.split()[0] for verb in VERBS}


def test_up_names_default_and_variable_of_every_flag(shell: Shell) -> None:
    """Broken: an operator cannot find how to set something in a container."""
    assert shell.run("up", "--help") == 0
    text = " ".join(re.sub("[│\n]", " ", shell.out).split())
    for name in UpSettings.model_fields:
        assert f"[{variable_name(UpSettings, name)}]" in text
    assert "[PENSTOCK_CONFIG]" in text
    assert "Default: 127.0.0.1:8080." in text


def test_the_lines_of_the_log_are_not_among_the_results(shell: Shell, tmp_path: Path) -> None:
    """Broken: a program that reads the JSON of `penstock migrate` finds lines of the log in front of it."""
    file = f"brokers: {{b: 'log://{tmp_path}/b'}}\nstreams: {{s: {{}}}}\n"
    (tmp_path / "pipes.yaml").write_text(file)
    own = ("--broker", f"log://{tmp_path}/own")
    assert shell.run("apply", *own) == 0
    assert shell.run("migrate", "s", "--to", "b", "--json", *own) == 0
    assert json.loads(shell.out)["home"] == "b"
    assert "stream_home" in shell.err


def test_lines_of_the_log_show_no_secret(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: a password is on the screen of an operator, or in the log of a job that runs commands."""
    assert shell.run("--version") == 0
    secret = "".join(("hun", "ter2"))  # as a value only: a traceback shows this file's lines
    try:
        raise RuntimeError(f"https://ann:{secret}@t refused us")
    except RuntimeError as error:
        structlog.get_logger().warning("failed", exc_info=error, password=secret)
    said = capsys.readouterr().err
    assert "refused us" in said
    assert secret not in said


def test_a_pipe_where_an_option_is_needed(shell: Shell) -> None:
    """Broken: who has just used `penstock loss show PIPE` tries the same here, and learns only that it is wrong."""
    assert shell.run("dead", "list", "orders") == 2
    assert "Try: --pipe orders" in shell.err


def test_no_colours_outside_a_terminal(shell: Shell) -> None:
    """Broken: logs and pipes are full of escape sequences."""
    shell.run("--help")
    assert shell.run("check") == 2
    assert "\x1b" not in shell.out + shell.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("up --frob", "No such option: --frob"),
        ("frob", "No such command 'frob'"),
        ("send", "Missing argument"),
        ("send UPPER x", "'UPPER' is not a stream's name"),
        ("send orders nofile.json", "nofile.json cannot be read: No such file or directory Try: ls ."),
        ("send orders no/file.json", "Try: a folder that exists: no does not"),
        ("send orders nofile.json --url ftp://x", "--url needs the address of ingest"),
        ("send orders nofile.json --url http://user:pw@x", "--url needs the address of ingest"),
        ("up -f nope.yaml", "nope.yaml: there is no such file. Try: penstock init"),
        ("up --drain 10", "--drain: a duration with a unit is needed (ms, s, m, h, d). Try: 10s or 7d"),
        ("up --listen 8080", "--listen: host:port is needed. Try: 127.0.0.1:8080"),
        ("up --ingest 0 --expel many", "--expel: a whole number is needed"),
        ("up --allow-networks 10.0.0.0/33", "--allow-networks: '10.0.0.0/33' is not a network. Try: 127.0.0.0/8"),
        ("check --allow-networks x", "--allow-networks: 'x' is not a network. Try: 127.0.0.0/8"),
        ("up --config nope.yaml", "nope.yaml: cannot be read"),
        ("demo --broker pulsar", "the demo does not support --broker 'pulsar'"),
        ("keys create --stream A.B", "streams: must match"),
        ("keys revoke nobody", "there is no keys.yaml"),
        ("listen --port 9000 --secret-file nope", "nope cannot be read"),
        ("listen --port 9000 --fail 2", "--fail"),
        ("log verify nowhere", "does not exist"),
        ("dead list", "no fleet runs on the data folder data, and it holds no log"),
        ("dead list --since yesterday", "'yesterday' is not a time. Try: 2h (ago)"),
        ("dead show late.dead", "'late.dead' is not a position"),
        ("dead redrive", "either positions or filters are needed"),
        ("dead discard --pipe p p.dead:0:1", "either positions or filters are needed"),
    ],
)
def test_mistakes_are_status_2_and_named(shell: Shell, command: str, message: str) -> None:
    """Broken: a mistake gives a traceback, or nothing that helps."""
    assert shell.run(*command.split()) == 2
    assert message in shell.said
    assert "Traceback" not in shell.err


def test_status_without_a_fleet(shell: Shell) -> None:
    """Broken: the status of nothing is a traceback or looks like health."""
    assert shell.run("status", "--data", "data") == 1
    assert shell.err == "error: no fleet runs on the data folder data\n  Try: penstock up, or --data with its folder\n"


def test_init_check_and_schema(shell: Shell) -> None:
    """Broken: what we write for a newcomer does not pass our own check."""
    assert shell.run("init") == 0
    assert shell.run("init") == 1
    assert "pipes.yaml exists already and was not changed" in shell.err
    assert shell.run("check") == 2
    assert shell.err.count("error: pipes.yaml:") == 2
    assert "127.0.0.1 is loopback. Try: --allow-networks 127.0.0.0/8, if this destination is meant" in shell.err
    assert (
        "webhook.secret cannot be read: No such file or directory. Try: penstock keys secret webhook.secret"
        in shell.err
    )
    assert shell.run("keys", "secret", "webhook.secret") == 0
    assert shell.run("check", "--allow-networks", "127.0.0.0/8", "--json") == 0
    found = json.loads(shell.out)
    assert "holds no log" in found.pop("waiting")["unknown"]
    counts = {"streams": 1, "pipes": 1, "destinations": 1}
    unknown = {"changes": None, "partitions": None}
    modes = {"large-orders": {"mode": "real-time", "why": ""}}
    assert found == {
        **counts,
        "problems": [],
        "warnings": [],
        "not_analysed": ["large-orders"],
        "modes": modes,
        **unknown,
    }
    assert shell.run("check", "--allow-networks", "127.0.0.0/8") == 0
    assert shell.out == "pipes.yaml is good: 1 stream, 1 pipe, 1 destination\n"
    trial = "Try: penstock try large-orders --sample FILE"
    mode = "micro-batch, not real-time, in large-orders: only Kafka can be read in real-time mode"
    assert shell.err == f"note: on the embedded log: {mode}\nthe transform was not analysed. {trial}\n"
    assert shell.run("check", "--json") == 2
    [problem] = json.loads(shell.out)["problems"]
    assert problem["where"].startswith("pipes.yaml:")
    assert problem["key"] == "pipes.large-orders.destinations[billing].webhook.url"
    assert "127.0.0.1 is loopback" in problem["message"]
    assert shell.run("schema") == 0
    assert json.loads(shell.out)["title"] == "Penstock pipe file"


def test_check_finds_names_that_sql_takes_for_a_subtraction(shell: Shell, tmp_path: Path) -> None:
    """Broken: a stream named web-shop passes the check, and its transform fails when Spark starts."""

    def check(sql: str) -> int:
        pipe = {"sources": ["web-shop"], "transform": {"sql": sql}, "destinations": [{"name": "x", "stream": "out"}]}
        file = {"streams": {"web-shop": {}, "out": {}}, "pipes": {"p": pipe}}
        (tmp_path / "pipes.yaml").write_text(json.dumps(file))
        return shell.run("check")

    more = (
        "SELECT a.event FROM (SELECT 1 AS n, 2 FROM a) q, web-shop",
        "SELECT event FROM a WHERE n IN (SELECT n FROM a b,web-shop)",
    )
    for sql in ("SELECT event FROM web-shop WHERE n > 1", "SELECT a.event FROM a join\n web-shop", *more):
        assert check(sql) == 2, sql
        assert "pipes.p.transform.sql: web-shop is written without back-quotes. Try: FROM `web-shop`" in shell.err
    good = ("SELECT event, web-shop FROM `web-shop` ORDER BY n, web-shop", "SELECT f(n, web-shop) FROM `web-shop`")
    for sql in (
        "SELECT event FROM `web-shop`",
        "SELECT event, 'FROM web-shop' AS t FROM `web-shop` -- FROM web-shop",
        *good,
    ):
        assert check(sql) == 0, (sql, shell.err)


def test_check_knows_the_master_of_the_transforms(shell: Shell, tmp_path: Path) -> None:
    """Broken: a table that executors cannot read, or the mode on a cluster, shows only when the service has started."""
    (tmp_path / "pipes.yaml").write_text(
        """version: 1
streams: {s: {}, t: {}}
tables:
  names: {parquet: names, columns: "n INT"}
pipes:
  p: {sources: [s], transform: {tables: [names], sql: SELECT event FROM s}, destinations: [{name: d, stream: t}]}
  q: {sources: [s], transform: {sql: SELECT event FROM s}, destinations: [{name: d, stream: t}]}
  r: {sources: [s], transform: {sql: SELECT event FROM s, interval: 1s}, destinations: [{name: d, stream: t}]}
"""
    )

    def modes(*options: str) -> dict[str, str]:
        assert shell.run("check", "--json", *options) == 0
        return {name: mode["why"] for name, mode in json.loads(shell.out)["modes"].items()}

    assert modes() == {"p": "plan", "q": "", "r": "interval"}
    assert modes("--broker", f"log://{tmp_path / 'log'}") == dict.fromkeys("pqr", "broker")
    (tmp_path / "settings.yaml").write_text("transform: {master: 'spark://one:7077'}\n")
    assert shell.run("check", "--config", "settings.yaml") == 2
    refused = "pipes.yaml:4: tables.names.parquet: the executors of spark://one:7077 are on other hosts"
    assert refused in shell.said
    text = (tmp_path / "pipes.yaml").read_text()
    (tmp_path / "pipes.yaml").write_text(text.replace("parquet: names", 'parquet: "s3a://bucket/names"'))
    assert modes("--config", "settings.yaml") == {"p": "plan", "q": "cluster", "r": "interval"}
    assert shell.run("check", "--config", "settings.yaml") == 0
    cluster = "note: micro-batch, not real-time, in q: the number of task slots of a cluster changes"
    assert cluster in shell.said


def test_check_knows_the_networks_of_the_fleet(shell: Shell, tmp_path: Path) -> None:
    """Broken: `check` refuses a destination to which the fleet on the same folder delivers, or which the next `up` accepts."""
    assert shell.run("init") == 0
    assert shell.run("keys", "secret", "webhook.secret") == 0
    state = write_fleet(tmp_path / "data")
    assert shell.run("check") == 2
    assert "127.0.0.1 is loopback" in shell.err
    (tmp_path / "settings.yaml").write_text("up: {allow_networks: 127.0.0.0/8}\n")
    assert shell.run("check", "--config", "settings.yaml") == 0, shell.err
    write_state(tmp_path / "data", msgspec.structs.replace(state, allow_networks="127.0.0.0/8"))
    assert shell.run("check") == 0, shell.err
    assert shell.run("check", "--allow-networks", "10.0.0.0/8") == 2
    assert shell.run("check", "--allow-networks", "") == 2, "none, as the next `up` without one"
    write_state(tmp_path / "data", msgspec.structs.replace(state, allow_networks="127.0.0.0/8", pid=2**22 + 1))
    assert shell.run("check") == 2, "the fleet is gone"


@pytest.mark.parametrize(("key", "count"), [("", 1), ("key: id", 0)])
def test_check_warns_of_an_order_without_a_key(shell: Shell, tmp_path: Path, key: str, count: int) -> None:
    """Broken: somebody forgets the stream's key, and believes that the events of a customer stay in order."""
    (tmp_path / "pipes.yaml").write_text(
        f"streams: {{a: {{{key}}}}}\npipes:\n  p:\n    sources: [a]\n    destinations:\n"
        "      - {name: x, webhook: {url: 'https://example.org', order: key}}\n"
    )
    assert shell.run("check", "--json") == 0
    found = json.loads(shell.out)["warnings"]
    assert [one["where"] for one in found] == ["pipes.yaml:6"] * count
    assert all("a has no `key`" in one["message"] for one in found)


def test_check_warns_of_a_pattern_for_an_id(shell: Shell, tmp_path: Path) -> None:
    """Broken: the file is good, and each event gets an id that its sender does not know."""
    (tmp_path / "pipes.yaml").write_text(
        'streams:\n  a:\n    id: "{parcel}-{status}"\n    key: parcel\n'
        "pipes: {p: {sources: [a], destinations: [{name: x, webhook: {url: 'https://example.org'}}]}}\n"
    )
    assert shell.run("check", "--json") == 0
    (found,) = json.loads(shell.out)["warnings"]
    assert (found["where"], found["key"]) == ("pipes.yaml:3", "streams.a.id")
    assert found["message"] == (
        f"{{parcel}}-{{status}} is taken for the name of one field: several are not combined. Try: {NO_SINGLE_FIELD}"
    )


def test_check_warns_of_a_secret_among_the_headers(shell: Shell, tmp_path: Path) -> None:
    """Broken: a token in the pipe file is noticed by nobody, is printed, or ends a fleet at its upgrade."""
    (tmp_path / "pipes.yaml").write_text(
        "streams: {a: {}}\npipes:\n  p:\n    sources: [a]\n    destinations:\n"
        "      - {name: x, webhook: {url: 'https://example.org', headers: {X-Api-Key: k3y}}}\n"
    )
    assert shell.run("check") == 0
    warning = "pipes.yaml:6: pipes.p.destinations[x].webhook.headers.X-Api-Key: looks like a secret"
    assert f"warning: {warning}" in shell.said
    assert "k3y" not in shell.err
    assert shell.run("check", "--json") == 0
    (found,) = json.loads(shell.out)["warnings"]
    assert (found["where"], "looks like a secret" in found["message"]) == ("pipes.yaml:6", True)


def test_check_shows_every_mistake_and_no_secret(shell: Shell, tmp_path: Path) -> None:
    """Broken: mistakes come one a run, or a pasted secret is printed."""
    secret = tmp_path / "open.secret"
    secret.write_text("whsec_" + "c2VjcmV0" * 5)
    secret.chmod(0o644)
    (tmp_path / "pipes.yaml").write_text(
        "streams: {a: {retention: 7}}\npipes:\n  p:\n    sources: [b]\n    transform: {python: 'nope.py:f'}\n"
        "    destinations:\n      - {name: x, webhook: {url: 'https://example.org', secret: {file: open.secret}}}\n"
        "      - {name: y, webhook: {url: 'https://example.org', secret: whsec_c2VjcmV0c2VjcmV0}}\n"
    )
    assert shell.run("check") == 2
    itself = "secret: the secret itself must not be here, only its place. Try: {file: webhook.secret} or {env: WEBHOOK_SECRET}"
    exposed = "open.secret can be read or written by everybody on this machine. Try: chmod 600 open.secret"
    assert shell.err.splitlines() == [
        "error: pipes.yaml:1: streams.a.retention: a duration with a unit is needed (ms, s, m, h, d). Try: 10s or 7d",
        f"error: pipes.yaml:8: pipes.p.destinations[y].webhook.{itself}",
        "error: pipes.yaml:4: pipes.p.sources.0: 'b' is not among streams: a",
        f"error: pipes.yaml:7: pipes.p.destinations[x].webhook.secret: {exposed}",
        "error: pipes.yaml:5: pipes.p.transform.python: there is no file nope.py",
    ]
    assert "c2VjcmV0" not in shell.err


def test_apply_creates_keeps_and_never_grows_silently(shell: Shell, tmp_path: Path) -> None:
    """Broken: applying twice fails, or keys change their partition without anybody having decided it; or the number in the file
    is more than a minimum, and `apply` and `check` fail after a growth, or hide it."""
    file = tmp_path / "pipes.yaml"
    text = "streams: {b: {}, a: {partitions: 2}}\npipes: {p: {sources: [a], destinations: [{name: d, stream: b}]}}\n"
    file.write_text(text)
    broker = f"log://{tmp_path}/log"
    assert shell.run("apply", "--broker", broker, "--json") == 0
    fleet = ["penstock.telemetry", "penstock.observer", "penstock.audit", "penstock.control"]
    topics = ["b", "a", "p.dead", *fleet]
    nothing: dict[str, object] = {"removed": {}, "changes": [], "partitions": [], "altered": []}
    assert json.loads(shell.out) == {"created": topics, "grown": [], "kept": [], **nothing}
    assert shell.run("apply", "--broker", broker, "--json") == 0
    assert json.loads(shell.out)["kept"] == topics
    file.write_text(text.replace("partitions: 2", "partitions: 3"))
    assert shell.run("apply", "--broker", broker) == 1
    assert "topic a has 2 partitions, the pipe file asks for 3; no event of it ever had a key" in shell.err
    assert "Try: penstock apply --grow" in shell.err
    assert shell.run("apply", "--broker", broker, "--grow", "--json") == 0
    assert json.loads(shell.out)["grown"] == ["a"]
    file.write_text(text)
    grown = "a has 3 partitions; the pipe file asks for at least 2. "
    assert shell.run("check", "--broker", broker) == 0
    assert re.search(rf"{re.escape(grown)}\S+@\S+ grew it from 2 at 20\S+Z", shell.err)
    at_broker(broker, lambda opened: opened.admin.add_partitions("a", 5))
    assert shell.run("apply", "--broker", broker, "--grow") == 0
    assert "a has 5 partitions; the pipe file asks for at least 2. The audit does not say who added them" in shell.err
    assert shell.run("check", "--broker", broker, "--json") == 0
    (found,) = json.loads(shell.out)["partitions"]
    assert (found["topic"], found["partitions"], found["wanted"], found["grown_by"]) == ("a", 5, 2, None)
    assert shell.run("dead", "audit", "--broker", broker) == 0
    assert re.search(r"\S+@\S+  grow +1  a  from=2 to=3\n", shell.out)


@pytest.mark.parametrize("broker", ["kinesis://x", "log://relative", "kafka://", "kafka://user:pw@host:9092"])
def test_broker_urls(shell: Shell, broker: str) -> None:
    """Broken: a typo in the broker's URL is tried for half a minute, or its password shown."""
    assert shell.run("init") == 0
    assert shell.run("apply", "--broker", broker, "--allow-networks", "127.0.0.0/8") == 2
    assert "Try" in shell.err
    assert "pw@" not in shell.err


def test_keys(shell: Shell, tmp_path: Path) -> None:
    """Broken: a key is stored in the clear, shown again, or not revoked; or none can be made that reads tables."""
    assert shell.run("keys", "create", "--stream", "orders", "--name", "shop", "--rate", "10") == 0
    token = shell.out.strip()
    assert re.fullmatch(r"psk_[a-z0-9]{8}_[0-9a-f]{40}", token)
    key_id, secret = token.split("_")[1:]
    assert secret not in shell.err + (tmp_path / "keys.yaml").read_text()
    assert stat.S_IMODE((tmp_path / "keys.yaml").stat().st_mode) == 0o600
    assert shell.run("keys", "revoke", key_id) == 0
    assert shell.run("keys", "revoke", "nobody00") == 1
    assert shell.run("keys", "list", "--json") == 0
    [entry] = json.loads(shell.out)
    assert (entry["id"], entry["name"], entry["streams"], entry["rate"]) == (key_id, "shop", ["orders"], 10)
    assert entry["revoked"]
    assert shell.run("keys", "list") == 0
    assert key_id in shell.out
    assert shell.run("keys", "create", "--stream", "orders", "--scope", "read") == 0
    assert [entry.scopes for entry in load_keys(tmp_path / "keys.yaml")] == [["ingest"], ["read"]]


def test_keys_with_a_date(shell: Shell, tmp_path: Path) -> None:
    """Broken: a date in the past or a misspelt one makes a key that is of no use, or one that never ends."""
    assert shell.run("keys", "create", "--stream", "orders", "--expires", "90d") == 0
    (entry,) = load_keys(tmp_path / "keys.yaml")
    assert entry.until == pytest.approx(time.time() + 90 * 86400, abs=60)
    for when, said in (("2020-01-01", "is in the past"), ("soon", "Try: 2027-01-31"), ("99999999999d", "too far away")):
        assert shell.run("keys", "expire", entry.id, when) == 2
        assert said in shell.err
    assert shell.run("keys", "expire", "nobody00", "90d") == 1
    assert shell.run("keys", "expire", entry.id, "2099-01-31") == 0
    assert shell.run("keys", "list") == 0
    assert "2099-01-31" in shell.out
    assert shell.run("keys", "expire", entry.id, "never") == 0
    assert load_keys(tmp_path / "keys.yaml")[0].expires is None


def test_signing_secret_file(shell: Shell, tmp_path: Path) -> None:
    """Broken: a secret that others can read, or a valuable one overwritten."""
    assert shell.run("keys", "secret", "s") == 0
    path = tmp_path / "s"
    before = path.read_text()
    assert before.startswith("whsec_")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert before.strip() not in shell.out + shell.err
    assert shell.run("keys", "secret", "s") == 1
    assert path.read_text() == before


def test_key_files_of_senders(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a key that everybody can read is used, or an empty one is sent."""
    events, key = tmp_path / "e.json", tmp_path / "key"
    events.write_text("[]")
    key.write_text("psk_aaaaaaaa_b")
    key.chmod(0o644)
    assert shell.run("send", "orders", events, "--key-file", key) == 2
    assert f"Try: chmod 600 {key}" in shell.err
    assert "psk_" not in shell.err
    monkeypatch.setenv("PENSTOCK_KEY", " ")
    assert shell.run("send", "orders", events) == 2
    assert "PENSTOCK_KEY holds no API key" in shell.err


def test_send_of_a_damaged_file(shell: Shell, tmp_path: Path) -> None:
    """Broken: a cut-off file counts as sent."""
    file = tmp_path / "e.json.gz"
    file.write_bytes(gzip.compress(b"[]" + b" " * 99_999)[:-5])
    with socket.create_server(("127.0.0.1", 0)) as ingest:
        assert shell.run("send", "orders", file, "--url", f"http://127.0.0.1:{ingest.getsockname()[1]}") == 1
    assert "the gzip data is damaged or incomplete" in shell.err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("up --listen {}", "ingest cannot listen on {}: Address already in use"),
        ("up --management {} --listen 127.0.0.1:{free}", "the supervisor cannot listen on {}: Address already in use"),
        ("listen --port {port}", "cannot listen on {}: Address already in use"),
    ],
)
def test_a_taken_port_is_named(shell: Shell, tmp_path: Path, command: str, message: str) -> None:
    """Broken: two fleets share a port unnoticed, or a traceback hides which of the ports is taken."""
    (tmp_path / "pipes.yaml").write_text("streams: {a: {}}\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        address = f"127.0.0.1:{port}"
        assert shell.run(*command.format(address, port=port, free=free_port()).split()) == 1
    error, remedy = shell.err.splitlines()
    assert error == f"error: {message.format(address)}"
    suggested = int(re.findall(r"\d+", remedy)[-1])  # one of the next that is free
    assert port < suggested <= port + 100


def test_send_to_a_place_where_nothing_listens(shell: Shell, tmp_path: Path) -> None:
    """Broken: with a wrong address a person looks at nothing for two minutes."""
    (tmp_path / "e.json").write_text('[{"a": 1}]')
    url = f"http://127.0.0.1:{free_port()}"
    assert shell.run("send", "orders", "e.json", "--url", url) == 1
    assert shell.err == (
        f"error: nothing was sent to {url}: nothing listens there\n  Try: --url, or --data with the folder of a fleet\n"
    )


def test_a_file_that_is_no_json_is_not_sent(shell: Shell, tmp_path: Path) -> None:
    """Broken: somebody sends a CSV file, reads that the events before the damage were sent, and looks for them."""
    (tmp_path / "orders.csv").write_text("id,amount\n1,2\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert shell.run("send", "orders", "orders.csv", "--url", f"http://127.0.0.1:{server.getsockname()[1]}") == 1
    assert "orders.csv: event 1, line 1: not valid JSON" in shell.err
    assert shell.err.endswith("Try: a JSON array, or one JSON object per line; nothing was sent\n")


def test_send_tells_what_it_skipped_from_what_ingest_refused(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a line that never left counts as refused, and is looked for in the figures of ingest; or the status is 0."""

    async def run(_raw: object, _target: object, summary: sender.SendSummary, *_rest: object) -> None:
        summary.accepted = summary.requests = 1
        summary.skip(SourceEvent(2, b"{", "not valid JSON", "line"))

    monkeypatch.setattr("services.fleet.verbs.send._run", run)
    assert shell.run("send", "orders", "/dev/null", "--url", "http://127.0.0.1:1", "--json") == 1
    told = json.loads(shell.out)
    assert (told["accepted"], told["refused"], told["skipped"], told["reasons"]) == (1, 0, 1, {})
    assert told["examples"] == [{"position": 2, "reason": "skipped", "detail": "not valid JSON"}]
    assert shell.run("send", "orders", "/dev/null", "--url", "http://127.0.0.1:1") == 1
    first, *rest = shell.err.splitlines()
    assert first.startswith("accepted 1, refused 0, skipped 1, retries 0; ")
    assert rest == ["  skipped 1: no JSON objects, so they were not sent", "    line 2: skipped: not valid JSON"]


def write_fleet(data: Path, *, keys: str | None = None, pid: int = os.getpid()) -> FleetState:
    """The state of a fleet on this folder whose processes are all down."""
    data.mkdir(exist_ok=True)
    (data / "pipes.yaml").write_text("streams: {orders: {}, flights: {}}\n")
    places = (f"log://{data}/log", str(data / "pipes.yaml"), f"0.0.0.0:{free_port()}", f"127.0.0.1:{free_port()}")
    state = FleetState(pid, "127.0.0.1:1", *places, [], keys)
    write_state(data, state)
    return state


@pytest.mark.parametrize("named", [False, True])
def test_send_waits_for_the_ingest_of_its_own_fleet(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    """Broken: send does not find the fleet, gives up while ingest is started again, or does not say at once why it waits."""
    monkeypatch.setattr(sender, "GIVE_UP_AFTER_S", 0.5)
    monkeypatch.setattr(sender, "_BASE_WAIT_S", 0.01)
    (tmp_path / "e.json").write_text('[{"a": 1}]')
    url = write_fleet(tmp_path / "data").listen.replace("0.0.0.0", "http://127.0.0.1")
    assert shell.run("send", "orders", "e.json", *(["--url", f"{url}/"] if named else [])) == 1
    first, *_, last, remedy = shell.err.splitlines()
    place = f"{url}/" if named else url
    assert first == f"waiting for ingest of the fleet on data at {place}, for up to 120 s: nothing listens there"
    assert "trying again" not in shell.err
    assert "ingest accepted nothing for 0 s" in last
    assert "the remaining events were not sent" in last
    assert "penstock status" in remedy


ONE_PIPE = """\
streams: {orders: {columns: id STRING}, out: {}}
pipes:
  p:
    sources: [orders]
    transform: {sql: "SELECT event, id FROM orders"}
    destinations: [{name: d, stream: out}]
"""
NEED_A_FLEET: dict[str, str] = {
    "send orders pipes.yaml": "--url with the address of ingest",
    "status": "",
    "loss show p": "--observer host:port",
    "dead list": "--broker",
    "group show -f pipes.yaml": "--broker",
    "event o-1": "--broker",
    "try p --from-stream 5": "--broker",
    "pause p": "--broker",
    "destination list -f pipes.yaml": "--broker",
    "log verify": "the log's folder as argument",
}


@pytest.mark.parametrize(
    ("verb", "killed"),
    [(verb, False) for verb in NEED_A_FLEET]
    + [
        (verb, True) for verb in ("send orders pipes.yaml", "status", "loss show p", "log verify")
    ],  # the others read its log
)
def test_without_a_fleet_every_verb_says_the_same(shell: Shell, tmp_path: Path, verb: str, killed: bool) -> None:
    """Broken: a verb takes a fleet that was killed for a running one, or its error names no way out."""
    (tmp_path / "pipes.yaml").write_text(ONE_PIPE)
    with subprocess.Popen(["true"]) as gone:
        gone.wait()
    if killed:
        write_fleet(tmp_path / "data", pid=gone.pid)
    assert shell.run(*verb.split()) in (1, 2)
    error, remedy = shell.err.splitlines()
    assert error.startswith("error: no fleet runs on the data folder data")
    assert remedy.startswith("  Try: penstock up")
    assert "--data with its folder" in remedy
    assert remedy.endswith(NEED_A_FLEET[verb])


@pytest.mark.parametrize("verb", ["event o-1", "group show", "destination list"])
def test_without_a_pipe_file_a_verb_says_how_to_name_the_fleet(shell: Shell, verb: str) -> None:
    """Broken: in another folder than the fleet's, a person is told to make a pipe file."""
    assert shell.run(*verb.split()) == 2
    assert shell.err.splitlines() == [
        "error: no fleet runs on the data folder data, and there is no pipes.yaml here",
        "  Try: --data with the folder of the fleet, or --pipes with its pipe file",
    ]


def test_the_keys_file_that_ingest_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the fleet's state names another keys file than its ingest reads."""
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "penstock.yaml"
    config.write_text("ingest: {keys: keys.yaml}\n")
    assert keys_of_ingest(None, {}) is None
    assert keys_of_ingest(config, {}) == str(tmp_path / "keys.yaml")
    assert keys_of_ingest(config, {"PENSTOCK_INGEST_KEYS": "/etc/keys.yaml"}) == "/etc/keys.yaml"
    config.write_text("observer: {}\n")
    assert keys_of_ingest(config, {}) is None


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ("0.0.0.0:80", "http://127.0.0.1:80"),
        ("[::]:80", "http://[::1]:80"),
        ("10.0.0.7:80", "http://10.0.0.7:80"),
        ("localhost:80", "http://localhost:80"),
    ],
)
def test_the_address_of_ingest_from_here(listen: str, url: str) -> None:
    """Broken: send connects to 0.0.0.0, which ingest without keys refuses as a foreign host."""
    assert ingest_url(listen) == url


def test_keys_of_the_running_fleet(shell: Shell, tmp_path: Path) -> None:
    """Broken: a new key goes to a file that ingest does not read, and nobody is told."""
    there = tmp_path / "elsewhere.yaml"
    write_fleet(tmp_path / "data", keys=str(there))
    assert shell.run("keys", "create", "--stream", "orders") == 0
    assert f"is in {there}. The line above is not shown again.\nIngest accepts the key within seconds." in shell.err
    assert shell.run("keys", "list") == 0
    assert "orders" in shell.out
    assert shell.run("keys", "create", "--stream", "orders", "--keys", "other.yaml") == 0
    assert f"The fleet on data reads {there}. Try: PENSTOCK_INGEST_KEYS=other.yaml penstock up" in shell.err
    write_fleet(tmp_path / "data")
    assert shell.run("keys", "create", "--stream", "orders") == 0
    assert "The fleet on data needs no key. Try: PENSTOCK_INGEST_KEYS=keys.yaml penstock up" in shell.err


def test_ctrl_c_ends_send_although_its_input_goes_on(tmp_path: Path) -> None:
    """Broken: `my-export | penstock send` cannot be stopped before the export gives something or ends."""
    write_fleet(tmp_path)
    command = [sys.executable, "-m", "services.fleet", "send", "orders", "-", "--data", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write('{"a": 1}\n' * 150)
        assert process.stderr.readline().startswith("waiting for ingest of the fleet on ")
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(600) == 130
        finally:
            process.kill()
        # A request may have been made: then a summary comes first.
        last = process.stderr.read().splitlines()[-1]
        assert last.startswith("stopped; "), "a stop that was asked for is no error"


def test_settings_that_up_decides(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an operator's setting for a service is overruled without a word."""
    file = tmp_path / "penstock.yaml"
    file.write_text("ingest:\n  max_body: 1MB\n  listen: 0.0.0.0:80\n")
    monkeypatch.setenv("PENSTOCK_EXPEL_ALLOW_NETWORKS", "10.0.0.0/8")
    assert shell.run("up", "--config", file) == 2
    decides = "penstock up decides this itself. Try: up"
    assert shell.err.splitlines() == [
        f"error: {file}:3: ingest.listen: {decides}.listen or PENSTOCK_UP_LISTEN",
        f"error: PENSTOCK_EXPEL_ALLOW_NETWORKS: {decides}.allow_networks or PENSTOCK_UP_ALLOW_NETWORKS",
    ]
