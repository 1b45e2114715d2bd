"""Signing secrets that are rotated while expel runs: what is sent next is signed with what the file says now."""

import asyncio
import base64
import time
from pathlib import Path

import pytest
import structlog
from prometheus_client import REGISTRY

from services.core.broker.connect import open_broker
from services.core.pipe_file.webhook import Secret
from services.core.security import file_watch
from services.core.security.signing import BadSecret, BadSignature, SigningKey, SigningKeys, verify, watch_secret
from services.expel.plan import read_plan, watch_secrets
from services.expel.settings import ExpelSettings
from tests.support.waiting_events import store
from tests.unit.expel.fake_sender import make_record
from tests.unit.expel.receiver import Received, open_receiver, wait_until
from tests.unit.expel.running_expel import running_expel, set_up_hook

OLD, NEW = ("whsec_" + base64.b64encode(letter * 24).decode() for letter in (b"o", b"n"))


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_watch, "READ_EVERY_S", 0.01)


def write_secret(path: Path, *lines: str, mode: int = 0o600) -> None:
    new = path.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_text("\n".join(lines))
    new.chmod(mode)
    new.replace(path)


def signed_with(request: Received, secret: str) -> bool:
    try:
        verify([SigningKey.parse(secret)], request.headers, request.body, now=time.time())
    except BadSignature:
        return False
    return True


def failures(name: str) -> float:
    return REGISTRY.get_sample_value("penstock_signing_keys_load_failures_total", {"name": name}) or 0.0


def age(name: str) -> float:
    return REGISTRY.get_sample_value("penstock_signing_keys_age_seconds", {"name": name}) or 0.0


async def test_a_rotation_needs_no_restart(tmp_path: Path) -> None:
    """Broken: a secret that leaked is taken out of the file, and expel signs with it until somebody restarts it."""
    write_secret(tmp_path / "hook.secret", OLD)
    async with open_receiver() as receiver, open_broker(f"log://{tmp_path}/log") as broker:
        hook = f"{{url: '{receiver.url}', secret: {{file: hook.secret}}, batch: {{max_events: 1}}}}"
        settings = await set_up_hook(tmp_path, broker, hook)
        async with running_expel(settings):

            async def signers() -> set[str]:
                """With what the next request is signed."""
                seen = len(receiver.requests)
                await store(broker, "s", [make_record(seen)])
                await wait_until(lambda: len(receiver.requests) > seen)
                return {secret for secret in (OLD, NEW) if signed_with(receiver.requests[seen], secret)}

            assert await signers() == {OLD}
            for lines in ((NEW, OLD), (NEW,)):
                await asyncio.to_thread(write_secret, tmp_path / "hook.secret", *lines)
                async with asyncio.timeout(600):
                    while await signers() != set(lines):
                        pass


async def test_a_file_that_cannot_be_used_leaves_the_keys(tmp_path: Path) -> None:
    """Broken: a typing mistake in a secret stops deliveries or sends them unsigned; or after it was mended it is not read."""
    path, keys, stopping = tmp_path / "hook.secret", SigningKeys([SigningKey.parse(OLD)]), asyncio.Event()
    write_secret(path, OLD)
    now, name = [0.0], "late/kept"
    watch = watch_secret(name, Secret(file=path), tmp_path, keys, lambda: now[0])
    with structlog.testing.capture_logs() as logs:
        async with asyncio.timeout(600), asyncio.TaskGroup() as group:
            group.create_task(watch.run(stopping))
            for lines, mode in (((NEW,), 0o644), (("whsec_!",), 0o600), ((), 0o600)):
                before = failures(name)
                await asyncio.to_thread(write_secret, path, *lines, mode=mode)
                await wait_until(lambda before=before: failures(name) > before + 1)  # type: ignore[misc]
                assert [key.digest(b"x") for key in keys.current] == [SigningKey.parse(OLD).digest(b"x")]
            now[0] += file_watch.STALE_AFTER_S
            await wait_until(lambda: any(entry["log_level"] == "error" for entry in logs))
            assert age(name) == file_watch.STALE_AFTER_S
            await asyncio.to_thread(write_secret, path, NEW, mode=0o644)
            before = failures(name)
            await wait_until(lambda: failures(name) > before + 1)
            await asyncio.to_thread(path.chmod, 0o600)
            await wait_until(lambda: age(name) == 0)
            assert [key.digest(b"x") for key in keys.current] == [SigningKey.parse(NEW).digest(b"x")]
            stopping.set()
    assert not any(secret.removeprefix("whsec_") in str(logs) for secret in (OLD, NEW))


def noted(name: str) -> float | None:
    return REGISTRY.get_sample_value("penstock_secret_expiry_timestamp_seconds", {"name": name, "key": "secret"})


async def test_the_dates_beside_secrets(tmp_path: Path) -> None:
    """Broken: a date becomes part of a secret; or the end of the old secret is hidden by that of the new one beside it."""
    path, keys = tmp_path / "hook.secret", SigningKeys()
    watch = watch_secret("late/noted", Secret(file=path), tmp_path, keys)
    await asyncio.to_thread(write_secret, path, "# expires: 2028-01-01", NEW, "# expires: 2027-01-31", OLD)
    await watch.load()
    assert [key.digest(b"x") for key in keys.current] == [SigningKey.parse(one).digest(b"x") for one in (NEW, OLD)]
    assert noted("late/noted") == 1801353600
    await asyncio.to_thread(write_secret, path, "# expires: 2028-01-01", NEW)
    await watch.load()
    assert (len(keys.current), noted("late/noted")) == (1, 1830297600)
    await asyncio.to_thread(write_secret, path, "# expires: 31.1.2027", NEW)
    with pytest.raises(BadSecret, match=r"hook\.secret: '31\.1\.2027' is not a date"):
        await watch.load()
    await asyncio.to_thread(
        write_secret, path, "# of the shop", NEW
    )  # no other comment: it may be a secret with a slip
    with pytest.raises(BadSecret):
        await watch.load()


def test_files_are_watched_and_variables_are_not(tmp_path: Path) -> None:
    """Broken: a destination's secret is forgotten, or a variable, which cannot change, is read again and again."""
    write_secret(tmp_path / "hook.secret", OLD)
    hooks = {"a": "secret: {file: hook.secret}", "b": "secret: {env: HOOK}", "c": "timeout: 1s"}
    listed = ", ".join(
        f"{{name: {name}, webhook: {{url: 'https://example.org/', {rest}}}}}" for name, rest in hooks.items()
    )
    (tmp_path / "pipes.yaml").write_text(
        f"streams: {{s: {{}}}}\npipes: {{late: {{sources: [s], destinations: [{listed}]}}}}"
    )
    plan = read_plan(ExpelSettings(pipes=tmp_path / "pipes.yaml"), {"HOOK": f"# expires: 2027-01-31\n{NEW}"})
    assert [len(lane.keys.current) for lane in plan.lanes] == [1, 1, 0]
    assert len(watch_secrets(plan.lanes, tmp_path)) == 1
    assert noted("late/b") == 1801353600
