"""Bearer tokens, secret headers and TLS files of destinations: what is accepted, and what happens when files change."""

import asyncio
import json
import os
import re
import shutil
import ssl
import subprocess
import threading
import time
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest
import structlog
from aiohttp import web
from prometheus_client import REGISTRY

from services.core.broker.connect import open_broker
from services.core.http.net_guard import NetPolicy
from services.core.pipe_file.destination_check import check_destinations, find_exposed_secrets
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.webhook import Secret, Tls, Webhook
from services.core.security import authorization, credentials, file_watch
from services.core.security.authorization import Credential, NoCredential, SecretHeader
from services.core.security.credentials import (
    BadCredential,
    Credentials,
    LiveValue,
    read_credentials,
    read_tls,
    read_value,
    watch_credentials,
)
from services.core.undelivered import dead_letter
from services.core.yaml_source import BadConfiguration, parse_yaml, validate_document
from tests.support.waiting_events import store, stored
from tests.unit.expel.fake_sender import make_record
from tests.unit.expel.receiver import Received, open_receiver, wait_until
from tests.unit.expel.running_expel import running_expel, set_up_hook

GOOD = """\
streams: {s: {}}
pipes:
  late:
    sources: [s]
    destinations:
      - name: hook
        webhook:
          url: https://example.com/hook
"""


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(text)
    new.chmod(mode)
    return new.replace(path)


def mistakes(folder: Path, *lines: str, environ: dict[str, str] | None = None) -> list[str]:
    """What `check` says about a webhook with these lines, the first of which is line 9."""
    text = GOOD + "".join(f"          {line}\n" for line in lines)
    document = parse_yaml(text, folder / "pipes.yaml")
    found = check_destinations(document, validate_document(document, PipeFile), NetPolicy(), environ)
    return [str(problem).removeprefix(f"{folder}/pipes.yaml:") for problem in found]


KEY = "pipes.late.destinations[hook].webhook"


def test_the_wrong_files_are_named_with_line_and_key(tmp_path: Path) -> None:
    """Broken: expel starts and sends without a token; or a person searches for the mistake."""
    write(tmp_path / "open", "T1", 0o644)
    assert mistakes(tmp_path, "auth:", "  bearer: {file: open}") == []
    opened = f"{tmp_path}/open can be read or written by everybody on this machine. Try: chmod 600 {tmp_path}/open"
    assert mistakes(tmp_path, "auth:", "  bearer: {file: open}", environ={}) == [f"10: {KEY}.auth.bearer: {opened}"]
    (missing,) = mistakes(tmp_path, "auth: {header: {name: X-Api-Key, value: {file: gone}}}", environ={})
    gone = f"{tmp_path}/gone cannot be read: No such file or directory. Try: install -m 600 /dev/stdin {tmp_path}/gone"
    gone += ", then paste the secret and press Ctrl-D"
    assert missing == f"9: {KEY}.auth.header.value: {gone}"
    oauth = "auth: {oauth: {token_url: 'http://10.0.0.1/', client_id: a, client_secret: {env: HOOK}, tls: {ca: gone}}}"
    assert [line.split(": ")[1] for line in mistakes(tmp_path, oauth, "tls: {ca: gone}", environ={})] == [
        f"{KEY}.auth.oauth.token_url",
        f"{KEY}.auth.oauth.tls",
        f"{KEY}.auth.oauth.client_secret",
        f"{KEY}.tls",
        f"{KEY}.auth.oauth.tls",
    ]


@pytest.mark.parametrize("url", ["https://ann:hunter2@t.example/", "https://t.example/?sig=hunter2"])
def test_a_secret_in_the_url_of_a_token_server_is_refused(tmp_path: Path, url: str) -> None:
    """Broken: a log, or whoever may read the pipe file, shows it."""
    text = f"{GOOD}          auth: {{oauth: {{token_url: '{url}', client_id: a, client_secret: {{env: A}}}}}}\n"
    with pytest.raises(BadConfiguration) as refused:
        validate_document(parse_yaml(text, tmp_path / "pipes.yaml"), PipeFile)
    assert f"{KEY}.auth.oauth.token_url: " in str(refused.value)
    assert "Try: client_id, and client_secret: {file: " in str(refused.value)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        (["auth: {header: {name: Host, value: {env: A}}}"], "auth.header.name: this header is set by Penstock"),
        (["auth: {header: {name: User-Agent, value: {env: A}}}"], "auth.header.name: this header is set by Penstock"),
        (["auth: {header: {name: 'X A', value: {env: A}}}"], "auth.header.name: is not a valid header name"),
        (["auth: {bearer: {env: A}}", "headers: {authorization: x}"], "auth: sets a header that is also in headers"),
    ],
)
def test_headers_that_auth_may_not_set(tmp_path: Path, lines: list[str], problem: str) -> None:
    """Broken: a request carries two values of a header, and which one counts depends on the receiver."""
    (found,) = mistakes(tmp_path, *lines)
    assert f"{KEY}.{problem}" in found


@pytest.mark.parametrize(
    ("auth", "problem"),
    [
        ({"bearer": "eyJsecret"}, "the secret itself must not be here, only its place"),
        ({}, "exactly one of bearer, header and oauth"),
        (
            {"bearer": {"env": "A"}, "header": {"name": "x", "value": {"env": "A"}}},
            "exactly one of bearer, header and oauth",
        ),
    ],
)
def test_what_auth_is_not(auth: object, problem: str) -> None:
    """Broken: a token in the pipe file is used, or one of two is silently left out."""
    with pytest.raises(ValueError, match=problem) as caught:
        Webhook.model_validate({"url": "https://example.com", "auth": auth})
    (error,) = caught.value.errors(include_input=False)  # type: ignore[attr-defined]
    assert "eyJsecret" not in str(error)


@pytest.mark.parametrize(
    ("text", "token", "problem"),
    [
        ("", True, "is empty"),
        (" \n", False, "is empty"),
        ("a\nb\n", False, "must have one line"),
        ("é", False, "must have one line"),
        ("a" * 8001, False, "must have one line"),
        ("a" * 20_000, False, "must have one line"),
        ("Bearer abc", True, "must have only the token"),
    ],
)
def test_values_that_are_no_header(tmp_path: Path, text: str, token: bool, problem: str) -> None:
    """Broken: a secret is cut off or smuggles a header, and every event is refused."""
    with pytest.raises(BadCredential, match=problem) as caught:
        read_value(Secret(file=write(tmp_path / "value", text)), tmp_path, {}, token=token)
    assert not text.strip() or text.strip() not in str(caught.value)


def test_values_that_are_used(tmp_path: Path) -> None:
    """Broken: the usual ways to write such a file are refused."""
    write(tmp_path / "value", "Basic dXNlcjpwYXNz\r\n")
    assert read_value(Secret(file=Path("value")), tmp_path, {}) == "Basic dXNlcjpwYXNz"
    assert read_value(Secret(env="A"), tmp_path, {"A": "1|a:b~"}, token=True) == "1|a:b~"
    with pytest.raises(BadCredential, match="the variable B is not set"):
        read_value(Secret(env="B"), tmp_path, {"A": "x"})


def test_tls_files_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: expel hangs at a password prompt, uses a key that everybody can read, or gives no reason."""
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj", "/CN=a"]
    for name in ("a", "b"):
        out = ("-keyout", tmp_path / f"{name}.key", "-out", tmp_path / f"{name}.pem")
        subprocess.run([*new, *(("-nodes",) if name == "a" else ("-passout", "pass:hunter2")), *out], check=True)
        (tmp_path / f"{name}.key").chmod(0o600)
    write(tmp_path / "open.key", (tmp_path / "a.key").read_text(), 0o644)
    write(tmp_path / "bad.pem", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    for files, problem in (
        ({"ca": "bad.pem"}, "has a certificate that cannot be read"),
        ({"ca": "a.key"}, "has no certificate in PEM form"),
        ({"ca": "."}, "cannot be read|is not a regular file"),
        ({"certificate": "a.pem", "key": "open.key"}, "can be read or written by everybody"),
        ({"certificate": "a.pem"}, "can be read or written by everybody|are not a certificate and its key"),
        ({"certificate": "b.pem", "key": "a.key"}, "is not the key of the certificate"),
        ({"certificate": "b.pem", "key": "b.key"}, "is protected by a password"),
        ({"certificate": "bad.pem", "key": "a.key"}, "are not a certificate and its key"),
    ):
        with pytest.raises(BadCredential, match=problem):
            read_tls(Tls.model_validate(files), tmp_path)
    make = credentials._make_context

    def change_meanwhile(tls: Tls, folder: Path) -> ssl.SSLContext:
        (folder / "a.pem").write_bytes((folder / "b.pem").read_bytes())
        return make(tls, folder)

    monkeypatch.setattr(credentials, "_make_context", change_meanwhile)
    with pytest.raises(BadCredential, match="changed while they were read"):
        read_tls(Tls(ca=Path("a.pem")), tmp_path)


def make_certificate(path: Path) -> None:
    """`path`.pem, signed by itself, and its `path`.key."""
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", f"{path}.key")
    subprocess.run(["openssl", "req", "-x509", *key, "-subj", "/CN=a", "-out", f"{path}.pem"], check=True)


def test_a_bundle_of_authorities_with_comments(tmp_path: Path) -> None:
    """Broken: the usual form of such a file is refused."""
    make_certificate(tmp_path / "a")
    (tmp_path / "a.key").chmod(0o600)
    write(tmp_path / "ca.pem", f"Müller AG\n{(tmp_path / 'a.pem').read_text()}" * 2, 0o644)
    read_tls(Tls(ca=Path("ca.pem"), certificate=Path("a.pem"), key=Path("a.key")), tmp_path)


def test_exposed_secrets_are_reported_and_not_refused() -> None:
    """Broken: nobody notices a token in the pipe file; or an upgrade refuses files that worked."""
    headers = "headers: {Authorization: Bearer abc, X-Api-Key: k, X-Team: river, Cookie: c}"
    document = parse_yaml(GOOD + f"          {headers}\n", Path("pipes.yaml"))
    pipes = validate_document(document, PipeFile)
    assert check_destinations(document, pipes, NetPolicy(), {}) == []
    found = [str(problem) for problem in find_exposed_secrets(document, pipes)]
    assert [line.split(": ")[:2] for line in found] == [
        ["pipes.yaml:9", f"{KEY}.headers.{name}"] for name in ("Authorization", "X-Api-Key", "Cookie")
    ]
    assert found[0].endswith("Try: auth: {bearer: {file: receiver.token}}")
    assert found[1].endswith("Try: auth: {header: {name: X-Api-Key, value: {file: receiver.key}}}")
    auth = "auth: {oauth: {token_url: 'http://localhost:9/', client_id: a, client_secret: {env: A}}}"
    document = parse_yaml(GOOD.replace("https", "http") + f"          {auth}\n", Path("pipes.yaml"))
    (plain,) = find_exposed_secrets(document, validate_document(document, PipeFile))
    assert (plain.where, plain.key) == ("pipes.yaml:8", f"{KEY}.url")


def test_the_examples_of_the_page_are_good(tmp_path: Path) -> None:
    """Broken: who copies an example of docs/delivery.md gets mistakes."""
    page = (Path(__file__).parents[3] / "docs" / "delivery.md").read_text()
    examples = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(examples) == 4
    write(tmp_path / "billing.token", "T1\n")
    write(tmp_path / "billing.client-secret", "s3cret\n")
    make_certificate(tmp_path / "penstock")
    shutil.copy(tmp_path / "penstock.pem", tmp_path / "company-ca.pem")
    for example in examples:
        assert mistakes(tmp_path, *example.splitlines(), environ={"BILLING_API_KEY": "k"}) == []


@pytest.fixture
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watch, "READ_EVERY_S", 0.01)


def sample(name: str) -> float:
    labels = {"name": "late/kept", "key": "auth.bearer"}
    return REGISTRY.get_sample_value(f"penstock_credentials_{name}", labels) or 0.0


@pytest.mark.usefixtures("_often")
async def test_a_file_that_cannot_be_used_leaves_the_value(tmp_path: Path) -> None:
    """Broken: a typing mistake stops deliveries or sends them without a token; or after it was mended it is not read."""
    path, value, stopping = tmp_path / "token", LiveValue("T1"), asyncio.Event()
    webhook = Webhook.model_validate({"url": "https://example.com", "auth": {"bearer": {"file": "token"}}})
    write(path, "T1")
    (watch,) = watch_credentials("late/kept", webhook, tmp_path, Credentials(value))
    with structlog.testing.capture_logs() as logs:
        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            group.create_task(watch.run(stopping))
            for text, mode in (("T2-secret", 0o644), ("two words", 0o600), ("", 0o600)):
                before = sample("load_failures_total")
                await asyncio.to_thread(write, path, text, mode)
                await wait_until(lambda before=before: sample("load_failures_total") > before + 1)  # type: ignore[misc]
                assert value.current == "T1"
            await asyncio.to_thread(write, path, "T2-secret")
            await wait_until(lambda: value.current == "T2-secret")
            stopping.set()
    assert [entry["event"] for entry in logs if entry["log_level"] == "warning"] == ["file_unusable"] * 3
    assert not any(part in str(logs) for part in ("T2-secret", "two words"))


def jwt(**claims: object) -> str:
    parts = ({"alg": "none"}, claims)
    return ".".join([*(urlsafe_b64encode(json.dumps(one).encode()).decode().rstrip("=") for one in parts), "c2ln"])


def terms(name: str, key: str) -> list[float | None]:
    labels = {"name": name, "key": key}
    return [
        REGISTRY.get_sample_value(f"penstock_token_{word}_timestamp_seconds", labels) for word in ("issued", "expiry")
    ]


async def test_the_end_of_a_token_is_shown(tmp_path: Path) -> None:
    """Broken: a token expires at night, and no alert came before; or the alert of the token before it never ends."""
    webhook = Webhook.model_validate({"url": "https://example.com", "auth": {"bearer": {"file": "token"}}})
    (watch,) = watch_credentials("late/jwt", webhook, tmp_path, Credentials(LiveValue("T1")))
    shown = []
    for text in (
        jwt(iat=1_000, exp=5_000),
        jwt(sub="ü", exp=2e9),
        jwt(exp=True),
        "opaque",
        "a.b.c",
        jwt(iat=9, exp=8.5),
    ):
        await asyncio.to_thread(write, tmp_path / "token", text)
        await watch.load()
        shown.append(terms("late/jwt", "auth.bearer"))
    assert shown[0] == [1_000, 5_000]
    assert [until for _, until in shown] == [5_000, 2e9, None, None, None, 8.5]
    for issued in (shown[1][0], shown[5][0]):  # no date of issue that can be right: it was read now
        assert issued == pytest.approx(time.time(), abs=60)
    header = {"name": "Authorization", "value": {"env": "CRM"}}
    webhook = Webhook.model_validate({"url": "https://example.com", "auth": {"header": header}})
    assert watch_credentials("late/env", webhook, tmp_path, Credentials(LiveValue(f"Bearer {jwt(iat=1, exp=2)}"))) == []
    assert terms("late/env", "auth.header.value") == [1, 2]


def noted(name: str, key: str) -> list[float | None]:
    labels = {"name": name, "key": key}
    return [
        REGISTRY.get_sample_value(f"penstock_secret_{word}_timestamp_seconds", labels) for word in ("expiry", "written")
    ]


async def test_the_date_beside_a_secret(tmp_path: Path) -> None:
    """Broken: the line with the date becomes part of the secret; it expires without a word; or its age is not shown."""
    path, held = tmp_path / "client.secret", LiveValue("s0")
    oauth = {"token_url": "https://login.example.org/", "client_id": "p", "client_secret": {"file": "client.secret"}}
    webhook = Webhook.model_validate({"url": "https://example.com", "auth": {"oauth": oauth}})
    (watch,) = watch_credentials("late/noted", webhook, tmp_path, Credentials(held))
    shown = []
    for text in ("s1", "# expires: 2027-01-31\ns2#", "s2#\n  #expires 2027-01-31T01:00:00Z", "s2#\n"):
        await asyncio.to_thread(write, path, text)
        await asyncio.to_thread(os.utime, path, (1000, 1000))
        await watch.load()
        shown.append((held.current, *noted("late/noted", "auth.oauth.client_secret")))
    assert shown == [("s1", None, 1000), ("s2#", 1801353600, 1000), ("s2#", 1801357200, 1000), ("s2#", None, 1000)]
    await asyncio.to_thread(write, path, "# expires: soon\ns3")
    with pytest.raises(BadCredential, match=r"client\.secret: 'soon' is not a date. Try: 2027-01-31"):
        await watch.load()
    bearer = Webhook.model_validate({"url": "https://example.com", "auth": {"bearer": {"env": "TOKEN"}}})
    found, mistakes = read_credentials(bearer, tmp_path, {"TOKEN": "# expires: 2027-01-31\nT1"})
    assert (mistakes, watch_credentials("late/variable", bearer, tmp_path, found)) == ([], [])
    assert noted("late/variable", "auth.bearer") == [1801353600, None]


async def test_a_rotated_token_is_read_when_the_old_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: between a rotation and the next look at the file, each event is a dead letter; or dead letters show the token."""
    monkeypatch.setattr(file_watch, "READ_EVERY_S", 600.0)
    monkeypatch.setattr(authorization, "READ_TIMEOUT_S", 600.0)
    write(tmp_path / "token", "T1-secret-token")
    accepted = "T1-secret-token"

    def answer(received: Received) -> web.Response:
        sent = received.headers["authorization"]
        return (
            web.Response(status=204) if sent == f"Bearer {accepted}" else web.Response(status=401, text=f"no: {sent}")
        )

    with structlog.testing.capture_logs() as logs:
        async with open_receiver(answer) as receiver, open_broker(f"log://{tmp_path}/log") as broker:
            hook = f"{{url: '{receiver.url}', auth: {{bearer: {{file: token}}}}, schedule: [], retry: {{attempts: 1}}}}"
            settings = await set_up_hook(tmp_path, broker, hook)
            async with running_expel(settings):
                for number, token in enumerate(("T1-secret-token", "T2-secret-token")):
                    accepted = token
                    await asyncio.to_thread(write, tmp_path / "token", token)
                    await store(broker, "s", [make_record(number)])
                    await receiver.wait_for_ids([f"e{number}"])
                accepted = "T3"
                await store(broker, "s", [make_record(2)])
                async with asyncio.timeout(600):
                    while not (dead := await stored(broker, "late.dead")):
                        await asyncio.sleep(0.05)
    assert dead[0].header(dead_letter.DETAIL) == b"the receiver answered 401: no: Bearer ***"
    assert "secret-token" not in str(logs)


async def test_one_read_of_the_file_serves_all_refused_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a file system that hangs takes all threads of expel, or holds a lane's requests for ever."""
    monkeypatch.setattr(authorization, "READ_TIMEOUT_S", 0.01)
    value, reads, go_on = LiveValue("T1"), 0, threading.Event()

    def read() -> str:
        nonlocal reads
        reads += 1
        go_on.wait(600)
        return "T2"

    header = SecretHeader(value, Credential.bearer, read)
    old = await header.get()
    for _ in range(3):
        outcomes = await asyncio.gather(*[header.renew(old) for _ in range(20)], return_exceptions=True)
        assert all(isinstance(one, NoCredential) and one.failure.recoverable for one in outcomes)
    await wait_until(lambda: reads == 1)
    monkeypatch.setattr(authorization, "READ_TIMEOUT_S", 600.0)
    go_on.set()
    renewed = await asyncio.gather(*[header.renew(old) for _ in range(20)])
    assert {one and one.secret for one in renewed} == {"T2"}
    assert reads == 1


async def test_a_value_that_was_replaced_meanwhile_is_used_at_once() -> None:
    """Broken: an older value that is still being read replaces a newer one."""
    value = LiveValue("T1")
    header = SecretHeader(value, Credential.bearer, lambda: "T1")
    old = await header.get()
    value.current = "T2"
    renewed = await header.renew(old)
    assert renewed is not None
    assert (renewed.secret, value.current) == ("T2", "T2")
