"""How the doctor collects facts: what answers, what does not, and what must not be touched by it."""

import asyncio
import datetime
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import format_datetime
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from services.core.broker.contract import TopicSpec
from services.core.broker.log import blocking
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.topics import create_topic, delete_topic
from services.core.broker.record import Record
from services.core.http.listening import serve_app
from services.core.pipe_file.pipes import PipeFile
from services.core.security.expiry import untils_of_pem
from services.fleet.doctor.checks import CHECKS
from services.fleet.doctor.collection import Where, collect_facts
from services.fleet.doctor.collectors import processes
from services.fleet.doctor.collectors.bounds import bounded, in_thread
from services.fleet.doctor.collectors.broker import collect_broker
from services.fleet.doctor.collectors.files import collect_checkpoints, collect_secrets, collect_snapshot
from services.fleet.doctor.collectors.network import collect_observer
from services.fleet.doctor.collectors.processes import collect_processes, parse_line, skew_of, tail
from services.fleet.doctor.diagnosis import diagnose
from services.fleet.doctor.facts import Facts, Instance
from services.fleet.observer_client import Observer
from services.fleet.problem import CommandFailed
from tests.support.ports import free_port

NOW = 1_790_000_000.0


@asynccontextmanager
async def service(*, ready: bool = True, ahead_s: float = 0.0, healthy: bool = True) -> AsyncIterator[str]:
    """A management port."""

    async def readyz(_request: web.Request) -> web.Response:
        date = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=ahead_s)
        body = {"ready": ready, "reason": None if ready else "the broker cannot be opened"}
        return web.json_response(
            body, status=200 if ready else 503, headers={"Date": format_datetime(date, usegmt=True)}
        )

    async def healthz(_request: web.Request) -> web.Response:
        return web.Response(text="ok" if healthy else "batch 7 is stuck", status=200 if healthy else 503)

    async def metrics(_request: web.Request) -> web.Response:
        text = '# TYPE penstock_build_info gauge\npenstock_build_info{service="expel",version="1"} 1.0\n'
        return web.Response(text=text)

    async def lags(_request: web.Request) -> web.Response:
        return web.json_response({})

    app = web.Application()
    routes = (("/readyz", readyz), ("/healthz", healthz), ("/metrics", metrics), ("/lags", lags))
    app.add_routes([web.get(path, handler) for path, handler in routes])
    async with serve_app(app, "127.0.0.1:0") as address:
        yield address


@pytest.fixture(autouse=True)
def _short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "WINDOW_S", 0.01)


async def answers_of(*addresses: str) -> list[Instance]:
    facts = Facts(NOW)
    facts.instances = [Instance(address, "", address) for address in addresses]
    await collect_processes(facts)
    return facts.instances


async def test_the_answers_of_processes() -> None:
    """Broken: a wrong clock, a stuck process or one that is not ready reads as healthy."""
    async with service() as good, service(ready=False) as waiting, service(ahead_s=3600, healthy=False) as odd:
        found = await answers_of(good, waiting, odd, f"127.0.0.1:{free_port()}")
    assert [one.answer for one in found] == ["ready", "not ready", "ready", "refused"]
    assert found[0].service == "expel"
    assert found[0].second is not None
    assert found[1].reason == "the broker cannot be opened"
    assert found[2].skew is not None
    assert found[2].skew > 3500
    assert found[2].unhealthy == "batch 7 is stuck"


async def test_a_process_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a process that was stopped by a signal is called dead, or the doctor waits for it for ever."""
    monkeypatch.setattr(processes, "PROBE", aiohttp.ClientTimeout(total=0.2))

    with socket.create_server(("127.0.0.1", 0)) as stopped:  # the kernel accepts for it, and it does not answer
        host, port = stopped.getsockname()
        [one] = await answers_of(f"{host}:{port}")
    assert one.answer == "silent"


def test_clocks() -> None:
    """Broken: a service without a Date counts as one whose clock is right, or wrong."""
    assert skew_of("Mon, 21 Sep 2026 14:13:20 GMT", NOW) == 0.0
    assert skew_of("nonsense", NOW) is None
    assert skew_of(None, NOW) is None


def test_the_tail_of_a_log(tmp_path: Path) -> None:
    """Broken: the last error of a service is not found, or shows a secret."""
    log = tmp_path / "expel-1.log"
    entry = b'{"event":"failed","level":"error","timestamp":"2026-11-23T03:28:37.5Z","token":"abc"}'
    log.write_bytes(b"x" * 400_000 + b"\n" + entry + b"\nerror: pipes.yaml:3: no\n")
    lines = tail(log)
    assert [line.text for line in lines][-1] == "error: pipes.yaml:3: no"
    assert (lines[-2].event, lines[-2].level) == ("failed", "error")
    assert lines[-2].at > 1.79e9
    assert parse_line(b"[1, 2]").at == 0.0
    assert tail(tmp_path / "absent") == ()


async def test_a_look_that_hangs_or_fails() -> None:
    """Broken: one disk that hangs keeps the doctor from saying what else is wrong."""
    facts = Facts(NOW)
    release = asyncio.Event()

    async def fail() -> None:
        await in_thread(lambda: Path("/no/such/file").read_text())

    async def hang() -> None:
        await release.wait()

    await asyncio.gather(bounded(facts, "the disk", 0.05, hang()), bounded(facts, "a file", 5.0, fail()))
    assert facts.unknown == {
        "the disk": "no answer within 0.05 s",
        "a file": "/no/such/file: No such file or directory",
    }


async def test_a_log_that_is_gone_stays_gone(tmp_path: Path) -> None:
    """Broken: the doctor makes an empty log where acknowledged events were, and the fleet starts on it."""
    facts = Facts(NOW, pipes=PipeFile.model_validate({"streams": {"orders": {}}}))
    facts.broker.url = f"log://{tmp_path / 'log'}"
    await collect_broker(facts)
    assert "is not there" in facts.broker.problem
    assert not (tmp_path / "log").exists()
    (tmp_path / "log" / "topics").mkdir(parents=True)
    await collect_broker(facts)
    assert "orders.db" in facts.broker.problem


async def test_another_broker_of_the_pipe_file_is_down(tmp_path: Path) -> None:
    """Broken: the doctor says that the fleet's own broker is down, and looks at nothing else."""
    other = f"kafka://127.0.0.1:{free_port()}"
    data = {"brokers": {"msk": other}, "streams": {"orders": {}, "bills": {"on": "msk"}}, "pipes": {}}
    facts = Facts(NOW, pipes=PipeFile.model_validate(data))
    facts.broker.url = f"log://{tmp_path / 'log'}"
    folder = await asyncio.to_thread(DataFolder.prepare, tmp_path / "log")
    await asyncio.to_thread(create_topic, folder, TopicSpec("orders", 1))
    await collect_broker(facts)
    assert (facts.broker.problem, facts.unknown) == ("", {})
    assert "broker msk of the pipe file" in facts.broker.silent["msk"]
    assert facts.broker.ends == {"orders": 0}
    assert "orders" not in facts.broker.missing


async def test_a_topic_of_the_log_that_was_deleted(tmp_path: Path) -> None:
    """Broken: the doctor says that the broker cannot be used when one topic was deleted; or that a topic whose file was lost is
    only missing, so that somebody makes an empty one in its place."""
    facts = Facts(NOW, pipes=PipeFile.model_validate({"streams": {"orders": {}, "clicks": {}}}))
    facts.broker.url = f"log://{tmp_path / 'log'}"
    folder = await asyncio.to_thread(DataFolder.prepare, tmp_path / "log")
    for name in ("orders", "clicks"):
        await asyncio.to_thread(create_topic, folder, TopicSpec(name, 1))
    await asyncio.to_thread(delete_topic, folder, "orders")
    await collect_broker(facts)
    assert facts.broker.problem == ""
    assert "orders" in facts.broker.missing
    assert "clicks" not in facts.broker.missing
    await asyncio.to_thread(create_topic, folder, TopicSpec("penstock.audit", 1))
    (tmp_path / "log" / "topics" / "penstock.audit.db").unlink()
    await collect_broker(facts)
    assert "penstock.audit.db" in facts.broker.problem
    (tmp_path / "log" / "topics" / "clicks.db").unlink()
    await collect_broker(facts)
    assert "clicks.db" in facts.broker.problem


def test_checkpoints_are_looked_for_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: `penstock doctor` says that checkpoints in S3, or in another folder, are gone, and how to begin again."""
    monkeypatch.delenv("PENSTOCK_TRANSFORM_CHECKPOINTS", raising=False)
    crm = {"name": "crm", "webhook": {"url": "https://e.org/"}}
    pipe = {"sources": ["orders"], "transform": {"sql": "SELECT event FROM orders"}, "destinations": [crm]}
    facts = Facts(NOW, tmp_path)
    facts.pipes = PipeFile.model_validate({"streams": {"orders": {}}, "pipes": {"shop": pipe}})
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "files.json").write_text(f'{{"{tmp_path}/penstock.yaml": "0-penstock.yaml"}}')
    for setting, expected in (("s3a://bucket/c", []), (str(tmp_path / "c"), [tmp_path / "c" / "shop"])):
        (tmp_path / "snapshot" / "0-penstock.yaml").write_text(f"transform: {{checkpoints: {setting}}}\n")
        collect_checkpoints(facts)
        assert [one.path for one in facts.checkpoints] == expected


def test_the_oldest_result_of_a_transform(tmp_path: Path) -> None:
    """Broken: `penstock doctor` takes a checkpoint for lost because its topics were created by a start that failed."""
    facts = Facts(NOW, tmp_path)
    crm = {"name": "crm", "webhook": {"url": "https://e.org/"}}
    pipe = {"sources": ["orders"], "transform": {"sql": "SELECT event FROM orders"}, "destinations": [crm]}
    facts.pipes = PipeFile.model_validate({"streams": {"orders": {}}, "pipes": {"shop": pipe}})
    folder = DataFolder.prepare(tmp_path / "log")
    create_topic(folder, TopicSpec("shop.out", 2))
    facts.broker.url = f"log://{tmp_path / 'log'}"
    for stored in (False, True):
        if stored:
            before = time.time()
            blocking.append(tmp_path / "log", "shop.out", {1: [Record(b"k", b"{}", 0)]})
        collect_checkpoints(facts)
        (one,) = facts.checkpoints
        assert one.first_result is None or (stored and before - 1 <= one.first_result <= time.time() + 1)
        assert (one.first_result is not None) is stored


def test_files_of_a_fleet(tmp_path: Path) -> None:
    """Broken: a secret that everybody can read, or an edit after the start, is not named."""
    secret = tmp_path / "s.secret"
    secret.write_text("whsec_" + "a2V5" * 8)
    secret.chmod(0o644)
    webhook = {"url": "https://e.org/", "secret": {"file": "s.secret"}}
    pipe = {"sources": ["orders"], "destinations": [{"name": "crm", "webhook": webhook}]}
    facts = Facts(NOW, tmp_path, pipes_path=tmp_path / "pipes.yaml")
    facts.pipes = PipeFile.model_validate({"streams": {"orders": {}}, "pipes": {"shop": pipe}})
    collect_secrets(facts)
    assert [(fault.path, "chmod 600" in fault.problem) for fault in facts.files] == [(str(secret), True)]
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "files.json").write_text(f'{{"{tmp_path}/pipes.yaml": "0-pipes.yaml"}}')
    (tmp_path / "snapshot" / "0-pipes.yaml").write_text("a\nb\n")
    (tmp_path / "pipes.yaml").write_text("a\nc\n")
    collect_snapshot(facts)
    assert "line 2" in facts.changed[0]


def test_certificates(tmp_path: Path) -> None:
    """Broken: the end of a certificate is misread, and an expired one counts as good."""
    path = tmp_path / "c.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for days in (2, 20_000):  # until 2049 the year has two digits, then four
        out = [*command, "-days", str(days), "-subj", "/CN=a", "-keyout", f"{path}.key", "-out", str(path)]
        subprocess.run(out, check=True, capture_output=True)
        shown = subprocess.run(["openssl", "x509", "-in", path, "-noout", "-enddate"], check=True, capture_output=True)
        text = shown.stdout.decode().strip().removeprefix("notAfter=")
        when = datetime.datetime.strptime(text, "%b %d %H:%M:%S %Y %Z").replace(tzinfo=datetime.UTC)
        assert untils_of_pem(path.read_bytes()) == [when.timestamp()]
    cut = b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"
    with pytest.raises(ValueError, match="cut off"):
        untils_of_pem(cut)


def test_the_way_to_kafka(tmp_path: Path) -> None:
    """Broken: the certificate with which every service reaches Kafka expires, and the doctor has not looked at its file."""
    own = tmp_path / "own.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run([*command, "-subj", "/CN=a", "-keyout", own, "-out", own], check=True, capture_output=True)
    own.chmod(0o644)
    (tmp_path / "kafka.yaml").write_text("tls: {certificate: own.pem}\n")
    facts = Facts(NOW, tmp_path, pipes_path=tmp_path / "pipes.yaml")
    crm = {"name": "crm", "webhook": {"url": "https://e.org/"}}
    facts.pipes = PipeFile.model_validate(
        {"streams": {"orders": {}}, "pipes": {"shop": {"sources": ["orders"], "destinations": [crm]}}}
    )
    facts.broker.url = f"kafka://k:9093?prefix=acme.&security={tmp_path}/kafka.yaml"
    collect_secrets(facts)
    (one,) = facts.certificates
    assert (one.lanes, one.path, one.until) == ((), own, untils_of_pem(own.read_bytes())[0])
    assert ["chmod 600" in fault.problem for fault in facts.files] == [True]


async def test_where_there_is_no_fleet(tmp_path: Path) -> None:
    """Broken: a mistake in --data reads as a healthy fleet, or as a traceback."""
    with pytest.raises(CommandFailed, match="no data folder") as caught:
        await collect_facts(Where(tmp_path / "absent"))
    assert caught.value.status == 2
    with pytest.raises(CommandFailed, match="No such file") as caught:
        await collect_facts(Where(tmp_path, targets=str(tmp_path / "targets.json")))
    assert caught.value.status == 2
    (tmp_path / "fleet.json").write_text("{")
    with pytest.raises(CommandFailed, match="no state of a fleet"):
        await collect_facts(Where(tmp_path))


async def test_processes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: with a list of targets a dead process is not named, or what was not asked counts as healthy."""
    monkeypatch.chdir(tmp_path)
    async with service() as good:
        dead = f"127.0.0.1:{free_port()}"
        (tmp_path / "t.json").write_text(
            f'[{{"targets": ["{good}"], "labels": {{"component": "expel", "process": "expel-1"}}}},'
            f'{{"targets": ["{dead}"], "labels": {{"component": "ingest", "process": "ingest-1"}}}}]'
        )
        shown: list[list[str]] = []
        where = Where(tmp_path / "absent", targets=str(tmp_path / "t.json"))
        facts = await collect_facts(where, lambda waiting: shown.append([*waiting]))
    assert shown == [["the processes"], []], "a person who waits sees for what"
    found = diagnose(facts, CHECKS)
    assert [cause.finding.what for cause in found.causes] == ["ingest-1 is dead."]
    assert {text.partition(":")[0] for text in found.unknown} == {"the pipe file", "the broker", "the observer"}


async def test_what_the_observer_knows() -> None:
    """Broken: the decisions of the autoscaler, or a field that has drifted, are not looked at; or a healthy pipe is asked for all
    of its fields; or a failure there hides the health of the pipes."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if request.path == "/v1/scaling" and asked.count(request.path) == 1:
            group = {
                "group": "expel",
                "at_ms": 7,
                "size": 2,
                "wanted": 4,
                "action": "hold",
                "reason": "at_max",
                "words": "lag",
            }
            return web.json_response({"groups": [{**group, "failed": ["i-1: absent"], "at": "1970"}]})
        if request.path == "/v1/pipes":
            pipes = [
                {"pipe": name, "health": health, "planned": None}
                for name, health in (("a", "healthy"), ("b", "degraded"))
            ]
            return web.json_response({"pipes": [*pipes, {"pipe": "c", "health": "degraded", "planned": "deploy"}]})
        if request.path == "/v1/pipes/b/fields" and asked.count(request.path) == 1:
            drift = {"node": "expel", "destination": "crm", "field": "amount", "what": "nulls", "text": "amount: null"}
            return web.json_response({"drifts": [drift, {**drift, "node": "ingest", "destination": None}]})
        return web.json_response({"title": "Busy"}, status=500)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with serve_app(app, "127.0.0.1:0") as address:
        facts = Facts(NOW)
        await collect_observer(facts, Observer(address))
        assert facts.observer.drifts == (("b", "expel crm amount: null"), ("b", "ingest amount: null"))
        assert [(one.reason, one.failed) for one in facts.observer.groups] == [("at_max", ("i-1: absent",))]
        assert asked.count("/v1/pipes/b/fields") == len([path for path in asked if path.endswith("/fields")]) == 1
        await collect_observer(facts, Observer(address))
    assert len(facts.observer.pipes) == 3
    assert facts.unknown == {"changed payload fields": "Busy"}
