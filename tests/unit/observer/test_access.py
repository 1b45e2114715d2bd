"""Who is let in: what each kind of request gets on loopback and beyond it."""

import asyncio
import base64
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from prometheus_client import REGISTRY
from structlog.testing import capture_logs

from services.autoscaler.groups.observer_client import ObserverUnavailable, open_observer
from services.core.http.address import is_named_authority
from services.core.process.settings import load_settings
from services.core.security import file_watch
from services.core.security.bearer import Tokens, read_tokens, watch_tokens
from services.core.yaml_source import BadConfiguration
from services.fleet.folder import OBSERVER_TOKEN_FILE, FleetState, keep_observer_token, write_state
from services.fleet.observer_client import Observer, find_observer, get_json
from services.fleet.problem import CommandFailed
from services.observer import app
from services.observer.http import serve_api
from services.observer.settings import ObserverSettings
from tests.unit.expel.receiver import wait_until

OLD, NEW, WRONG = "o" * 20 + "ld", "n" * 20 + "ew", "w" * 22


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(f"{NEW}\n{OLD}\n")
    return path


async def said(_request: web.Request) -> web.Response:
    return web.json_response({"destinations": [], "planned": [], "pipes": []})


@pytest.fixture
def tokens(file: Path) -> Tokens:
    return Tokens(read_tokens(file))


ROUTES = [web.get(path, said) for path in ("/v1/pipes", "/v1/destinations", "/v1/planned")]


@asynccontextmanager
async def beyond_loopback(tokens: Tokens | None) -> AsyncIterator[str]:
    """Its port. Bound to every address, as in a container."""
    async with serve_api("0.0.0.0:0", ROUTES, tokens=tokens, names=frozenset(["observer"])) as bound:
        yield bound.rpartition(":")[2]


def put(file: Path, token: str, mode: int) -> None:
    """Another file in its place, at once."""
    new = file.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text(f"{token}\n")
    new.chmod(mode)
    new.replace(file)


def failures() -> float:
    return REGISTRY.get_sample_value("penstock_observer_tokens_load_failures_total") or 0.0


def basic(token: str) -> str:
    return "Basic " + base64.b64encode(f"anybody:{token}".encode()).decode()


@pytest.mark.parametrize(
    ("host", "credential", "status"),
    [
        ("observer", f"Bearer {NEW}", 200),
        ("observer:8081", f"bearer {OLD}", 200),
        ("OBSERVER", basic(NEW), 200),
        ("10.1.2.3:8081", f"Bearer {NEW}", 200),
        ("[fd00::1]", f"Bearer {NEW}", 200),
        ("localhost", f"Bearer {NEW}", 200),
        ("observer", "", 401),
        ("observer", "Bearer", 401),
        ("observer", f"Bearer {WRONG}", 401),
        ("observer", f"Bearer {NEW[:-1]}", 401),
        ("observer", f"Token {NEW}", 401),
        ("observer", NEW, 401),
        ("observer", "Basic %%%", 401),
        ("observer", basic(""), 401),
        ("127.0.0.1", "", 401),
        ("evil.example", f"Bearer {NEW}", 421),
        ("observer.evil.example", f"Bearer {NEW}", 421),
        ("evil.example", "", 421),
    ],
)
async def test_beyond_loopback_everybody_is_asked(tokens: Tokens, host: str, credential: str, status: int) -> None:
    """Broken: whoever reaches the observer's port reads field means and event ids, or a page of somebody else does."""
    head = {"Host": host, **({"Authorization": credential} if credential else {})}
    async with (
        beyond_loopback(tokens) as port,
        aiohttp.ClientSession() as session,
        session.get(f"http://127.0.0.1:{port}/v1/pipes", headers=head) as answer,
    ):
        assert answer.status == status
        assert ("WWW-Authenticate" in answer.headers) == (status == 401)


async def test_a_token_is_rotated_without_a_restart(
    file: Path, tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a token that leaked opens the observer until somebody restarts it; or a slip with the file shuts everybody out,
    or keeps the leaked one valid without a word."""
    monkeypatch.setattr(file_watch, "READ_EVERY_S", 0.01)
    stopping, now, newest = asyncio.Event(), [0.0], "x" * 30
    watch = watch_tokens(file, tokens, lambda: now[0])
    with capture_logs() as logs:
        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            group.create_task(watch.run(stopping))
            assert tokens.allows(f"Bearer {OLD}")
            await asyncio.to_thread(put, file, NEW, 0o600)
            await wait_until(lambda: not tokens.allows(f"Bearer {OLD}"))
            assert tokens.allows(f"Bearer {NEW}")
            await asyncio.to_thread(put, file, newest, 0o644)
            before = failures()
            await wait_until(lambda: failures() > before + 2)
            assert tokens.allows(f"Bearer {NEW}")
            now[0] += file_watch.STALE_AFTER_S
            await wait_until(lambda: any(line["log_level"] == "error" for line in logs))
            await asyncio.to_thread(file.chmod, 0o600)
            await wait_until(lambda: tokens.allows(f"Bearer {newest}"))
            await wait_until(lambda: watch.age == 0)
            stopping.set()
    assert [line["event"] for line in logs].count("file_unusable") == 1, "it is said once"
    assert not any(token in f"{tokens!r} {logs}" for token in (OLD, NEW, newest))


async def test_a_date_beside_the_tokens(file: Path) -> None:
    """Broken: the line with the date counts as tokens, or the date is shown nowhere."""
    await asyncio.to_thread(file.write_text, f"# expires: 2027-01-31\n{NEW}\n")
    tokens = Tokens([])
    await watch_tokens(file, tokens).load()
    assert tokens.current == (NEW,)
    labels = {"name": "observer", "key": "tokens"}
    assert REGISTRY.get_sample_value("penstock_secret_expiry_timestamp_seconds", labels) == 1801353600


@pytest.mark.parametrize("text", ["", "short\n", f"{NEW} {NEW} " * 6, "no spaces in tokens, please\n", "\x00" * 40])
def test_what_is_no_token_file_is_refused_and_not_shown(file: Path, text: str) -> None:
    """Broken: an empty line is a token that everybody has; or the error shows what the file holds."""
    file.write_text(text)
    with pytest.raises(BadConfiguration, match="1 to 10 tokens") as caught:
        read_tokens(file)
    assert not text.strip() or text.strip() not in str(caught.value)
    file.unlink()
    os.mkfifo(file, 0o600)
    with pytest.raises(BadConfiguration, match="not a regular file"):
        read_tokens(file)


def test_without_tokens_it_stays_on_loopback(file: Path) -> None:
    """Broken: the observer of a container is open to everybody because a variable was forgotten."""
    with pytest.raises(BadConfiguration, match="token-file"):
        app._read_tokens(load_settings(ObserverSettings, ["--listen", "0.0.0.0:8081"], {}))
    assert app._read_tokens(load_settings(ObserverSettings, [], {})) is None
    given = ["--listen", "0.0.0.0:8081", "--token-file", str(file), "--names", "Observer, observer.example.org"]
    settings = load_settings(ObserverSettings, given, {})
    assert app._read_tokens(settings) is not None
    assert settings.names == "observer,observer.example.org"
    with pytest.raises(BadConfiguration):
        load_settings(ObserverSettings, ["--names", "observer:8081"], {})


@pytest.mark.parametrize(
    "authority", ["", "a" * 300, "observer:8081:1", "http://observer", "observer/", "ob server", "[::1"]
)
def test_what_is_no_host_is_refused(authority: str) -> None:
    """Broken: a mangled Host header gets by."""
    assert not is_named_authority(authority, frozenset(["observer"]))


async def test_the_autoscaler_and_the_command_line_present_it(file: Path, tokens: Tokens, tmp_path: Path) -> None:
    """Broken: with a token nobody scales, and `penstock loss` shows nothing."""
    found = await asyncio.to_thread(find_observer, "o:1", tmp_path, file)
    assert NEW not in repr(found)
    async with beyond_loopback(tokens) as port:
        address = f"127.0.0.1:{port}"
        async with open_observer(address, file) as client:
            assert (await client.read()).unstable == ()
        async with open_observer(address) as client:
            with pytest.raises(ObserverUnavailable, match="401"):
                await client.read()
        async with open_observer(address, tmp_path / "none") as client:
            with pytest.raises(ObserverUnavailable, match="no token for the observer"):
                await client.read()
        said = await get_json(Observer(address, found.token), "/v1/pipes", {})
        assert said == {"destinations": [], "planned": [], "pipes": []}
        with pytest.raises(CommandFailed, match="A token is needed"):
            await get_json(Observer(address), "/v1/pipes", {})


def test_the_fleet_on_a_folder_has_a_token_of_its_own(tmp_path: Path) -> None:
    """Broken: everybody on the machine can read the fleet's token, it is another at each start, or it goes to other observers."""
    keep_observer_token(tmp_path)
    path = tmp_path / OBSERVER_TOKEN_FILE
    (token,) = read_tokens(path)
    assert path.stat().st_mode & 0o777 == 0o600
    keep_observer_token(tmp_path)
    assert read_tokens(path) == (token,)
    write_state(tmp_path, FleetState(1, "m:1", "log:///", "p", "l:1", "o:1", []))
    assert find_observer(None, tmp_path) == Observer("o:1", token)
    assert find_observer("other:1", tmp_path) == Observer("other:1")
