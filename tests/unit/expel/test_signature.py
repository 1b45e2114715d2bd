"""Signatures, against an independent implementation of the specification."""

import base64
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from services.core.pipe_file.webhook import Secret
from services.core.security.signing import BadSecret, BadSignature, SigningKey, read_signing_keys, sign, verify

OLD = "whsec_" + base64.b64encode(b"o" * 24).decode()
NEW = "whsec_" + base64.b64encode(b"n" * 32).decode()
BODY = '[{"id":"é"}]'.encode()


def headers(keys: list[str], *, at: float, body: bytes = BODY) -> dict[str, str]:
    stamp = int(at)
    signature = sign([SigningKey.parse(key) for key in keys], "msg_1", stamp, body)
    return {"webhook-id": "msg_1", "webhook-timestamp": str(stamp), "webhook-signature": signature}


@pytest.mark.parametrize("secret", [OLD, NEW])
def test_others_verify_ours(secret: str) -> None:
    """Broken: receivers refuse our requests, with the old key or the new one during a rotation."""
    now = datetime.now(UTC).timestamp()
    assert Webhook(secret).verify(BODY, headers([NEW, OLD], at=now)) == [{"id": "é"}]


def test_we_verify_others() -> None:
    """Broken: `penstock listen` refuses genuine requests of another sender."""
    now = datetime.now(UTC)
    signature = Webhook(OLD).sign("msg_2", now, BODY.decode())
    given = {
        "webhook-id": "msg_2",
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": "v1a,AAAA v1,%%% " + signature,
    }
    assert verify([SigningKey.parse(NEW), SigningKey.parse(OLD)], given, BODY, now=now.timestamp()) == "msg_2"


def test_forgeries_are_refused() -> None:
    """Broken: anybody can send events to a receiver that uses our verify."""
    keys, good = [SigningKey.parse(OLD)], headers([OLD], at=1000)
    assert verify(keys, good, BODY, now=1000) == "msg_1"
    for bad in (
        {"webhook-id": "msg_2"},
        {"webhook-timestamp": "1001"},
        {"webhook-timestamp": "-5"},
        {"webhook-timestamp": "1e3"},
        {"webhook-timestamp": "\u0661000"},
        {"webhook-signature": ""},
        {"webhook-signature": "v1,"},
        {"webhook-signature": good["webhook-signature"].replace("v1,", "v2,")},
        {"webhook-id": "\udcff"},
    ):
        with pytest.raises(BadSignature):
            verify(keys, good | bad, BODY, now=1000)
    for now in (1301.0, 699.0):
        with pytest.raises(BadSignature, match="off"):
            verify(keys, good, BODY, now=now)
    with pytest.raises(BadSignature):
        verify(keys, good, BODY + b" ", now=1000)
    with pytest.raises(WebhookVerificationError):
        Webhook(NEW).verify(BODY, headers([OLD], at=datetime.now(UTC).timestamp()))


@pytest.mark.parametrize("text", ["", "whsec_", "whsec_!!!!", "whsec_" + "A" * 8, "whsec_" + "A" * 400, "é" * 40])
def test_bad_secrets_are_named_but_not_shown(text: str) -> None:
    """Broken: a weak or garbled secret signs silently, or an error message shows it."""
    with pytest.raises(BadSecret) as caught:
        SigningKey.parse(text)
    assert len(text) < 8 or text not in str(caught.value)


def test_repr_shows_nothing() -> None:
    """Broken: a log line or a traceback with locals shows the key."""
    key = SigningKey.parse(OLD)
    assert repr(key) == "SigningKey(***)"
    assert not hasattr(key, "__dict__")


def test_secret_file(tmp_path: Path) -> None:
    """Broken: rotation by two lines in the file does not work."""
    path = tmp_path / "hook.secret"
    path.write_text(f"{NEW}\n{OLD}\n")
    path.chmod(0o600)
    keys = read_signing_keys(Secret(file=Path("hook.secret")), tmp_path, {})
    assert sign(keys, "a", 1, b"") == sign([SigningKey.parse(NEW), SigningKey.parse(OLD)], "a", 1, b"")


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o606])
def test_world_readable_secret_is_refused(tmp_path: Path, mode: int) -> None:
    """Broken: everybody on the machine can sign as us."""
    path = tmp_path / "hook.secret"
    path.write_text(NEW)
    path.chmod(mode)
    with pytest.raises(BadSecret, match="chmod 600") as caught:
        read_signing_keys(Secret(file=path), tmp_path, {})
    assert NEW not in str(caught.value)


def test_unusable_secret_sources_are_named(tmp_path: Path) -> None:
    """Broken: a missing secret becomes an unsigned request or a stack trace."""
    os.mkfifo(tmp_path / "fifo", 0o600)
    for secret, word in (
        (Secret(env="HOOK"), "HOOK"),
        (Secret(file=Path("none")), "none"),
        (Secret(file=tmp_path), "regular file|directory"),
        (Secret(file=Path("fifo")), "regular file"),
    ):
        with pytest.raises(BadSecret, match=word):
            read_signing_keys(secret, tmp_path, {})
    with pytest.raises(BadSecret, match="0 secrets"):
        read_signing_keys(Secret(env="HOOK"), tmp_path, {"HOOK": " \n"})
    assert len(read_signing_keys(Secret(env="HOOK"), tmp_path, {"HOOK": NEW})) == 1
