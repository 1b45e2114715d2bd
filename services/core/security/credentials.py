"""Credentials, which authenticate us at a receiver: a token, a header's value or an OAuth client's secret, and the files of TLS.

They are in files or environment variables, never in the pipe file. The files are watched: a rotation needs no restart.
"""

import base64
import hashlib
import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

import structlog

from services.core import metrics
from services.core.pipe_file.webhook import Secret, Tls, Webhook
from services.core.security.expiry import show_secret, split_notes, term_of_token, untils_of_pem
from services.core.security.file_watch import MAX_PRIVATE_BYTES, FileWatch, UnusableFile, changed_at, read_regular
from services.core.yaml_source import KeyPath

log = structlog.get_logger()

MAX_VALUE = 8000
"""Characters. Most receivers refuse a head with more than 8 KB."""
_MAX_CERTIFICATES = 1_000_000
"""Bytes. The bundle of all public authorities has 200 kB."""
_VALUE = re.compile(r"[!-~](?:[\t -~]*[!-~])?")
_PEM_CERTIFICATE = re.compile(
    r"-----BEGIN (TRUSTED )?CERTIFICATE-----(.+?)-----END (?:TRUSTED )?CERTIFICATE-----", re.DOTALL
)
_STALE = "requests carry the old content. Try: correct the file, or restart the service"


class BadCredential(ValueError):
    """A secret, certificate or key cannot be used. The message is for a person; it never shows a secret."""


def read_value(secret: Secret, folder: Path, environ: Mapping[str, str], *, token: bool = False) -> str:
    """The one line of the file or variable. token: it has no spaces. folder: of the pipe file, for a relative path. Blocking.

    A line `# expires: 2027-01-31` beside it does not count. Raises BadCredential, which names the file or variable.
    """
    return read_noted(secret, folder, environ, token=token)[0]


def read_noted(
    secret: Secret, folder: Path, environ: Mapping[str, str], *, token: bool = False
) -> tuple[str, float | None]:
    """As `read_value`; and when it ends by its note, in seconds since the epoch."""
    if secret.env is not None:
        where, given = f"the variable {secret.env}", environ.get(secret.env)
        if given is None:
            raise BadCredential(f"{where} is not set")
    else:
        assert secret.file is not None
        path = folder / secret.file
        where = str(path)
        try:
            remedy = f"install -m 600 /dev/stdin {path}, then paste the secret and press Ctrl-D"
            given = read_regular(path, MAX_PRIVATE_BYTES, remedy=remedy).decode("ascii", errors="replace")
        except UnusableFile as error:
            raise BadCredential(f"{where} {error}") from None
    try:
        given, until = split_notes(given)
    except ValueError as error:
        raise BadCredential(f"{where}: {error}") from None
    value = given.strip()
    if not value:
        raise BadCredential(f"{where} is empty")
    if len(value) > MAX_VALUE or not _VALUE.fullmatch(value):
        raise BadCredential(f"{where} must have one line of at most {MAX_VALUE} printable ASCII characters")
    if token and " " in value:
        raise BadCredential(f"{where} must have only the token, without spaces and without a word before it")
    return value, until


def read_tls(tls: Tls, folder: Path, *, http: bool = True) -> tuple[bytes, ssl.SSLContext]:
    """The digest of the files, and a context made from them; http: for HTTP/1.1. Blocking, up to 0.1 s. Raises BadCredential."""
    digest = digest_files(tls, folder)
    context = _make_context(tls, folder)
    if http:
        context.set_alpn_protocols(["http/1.1"])
    if digest_files(tls, folder) != digest:  # OpenSSL reads the files once more by itself
        raise BadCredential("the files changed while they were read")
    return digest, context


def digest_files(tls: Tls, folder: Path) -> bytes:
    """Of the content of the files. Blocking. Raises BadCredential."""
    digest = hashlib.sha256()
    for file, private in ((tls.ca, False), (tls.certificate, tls.key is None), (tls.key, True)):
        content = b"" if file is None else read_pem(folder / file, private=private)
        digest.update(b"%d:%b" % (len(content), content))
    return digest.digest()


def read_pem(path: Path, *, private: bool) -> bytes:
    """The content of a file of TLS; private: other users must not have access. Blocking. Raises BadCredential."""
    try:
        return read_regular(path, _MAX_CERTIFICATES, private=private)
    except UnusableFile as error:
        raise BadCredential(f"{path} {error}") from None


def read_certificates(path: Path) -> str:
    """Those of a file in PEM form, in the one form that everybody reads. Blocking. Raises BadCredential."""
    text = read_pem(path, private=False).decode("ascii", errors="replace")
    found = [_drop_trust(each[2], path) if each[1] else each[0] for each in _PEM_CERTIFICATE.finditer(text)]
    if not found:
        raise BadCredential(f"{path} has no certificate in PEM form")
    return "\n".join(found)


def _drop_trust(content: str, path: Path) -> str:
    """OpenSSL's form `TRUSTED CERTIFICATE` has the certificate, and behind it what it is trusted for. Java and Python do not know
    it."""
    try:
        data = base64.b64decode(content)
        extra = data[1] & 127 if data[1] > 127 else 0  # bytes of the length (X.690, 8.1.3)
    except (ValueError, IndexError):
        raise BadCredential(f"{path} has a certificate that cannot be read") from None
    length = int.from_bytes(data[2 : 2 + extra], "big") if extra else data[1]
    encoded = base64.encodebytes(data[: 2 + extra + length]).decode()
    return f"-----BEGIN CERTIFICATE-----\n{encoded}-----END CERTIFICATE-----"


def _make_context(tls: Tls, folder: Path) -> ssl.SSLContext:
    if tls.ca is None:
        context = ssl.create_default_context()
    else:
        path = folder / tls.ca
        found = read_certificates(path)
        try:
            context = ssl.create_default_context(cadata=found)
        except (ssl.SSLError, ValueError):
            raise BadCredential(f"{path} has a certificate that cannot be read") from None
    if tls.certificate is not None:
        _load_own(context, folder / tls.certificate, folder / (tls.key or tls.certificate))
    return context


def _load_own(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    asked = False

    def refuse_password() -> str:
        nonlocal asked
        asked = True
        return ""

    try:
        context.load_cert_chain(certificate, key, refuse_password)
    except (OSError, ValueError) as error:
        if asked:
            raise BadCredential(
                f"{key} is protected by a password. Try: openssl pkey -in {key} -out {key}.plain"
            ) from None
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise BadCredential(f"{key} is not the key of the certificate in {certificate}") from None
        raise BadCredential(f"{certificate} and {key} are not a certificate and its key in PEM form") from None


Value = TypeVar("Value")


class LiveValue(Generic[Value]):
    """A value in use, replaced when its file changes. `current` is read for each request or connection. No repr shows it."""

    __slots__ = ("current",)

    def __init__(self, current: Value) -> None:
        self.current = current

    def __repr__(self) -> str:
        return "LiveValue(***)"


class Credentials:
    """Those of one webhook. value: of its `auth`. tls, token_tls: for the receiver and for the token server.

    None: the pipe file has none. until: when the value that was read first ends by its note, in seconds since the epoch.
    """

    def __init__(
        self,
        value: LiveValue[str] | None = None,
        tls: LiveValue[ssl.SSLContext] | None = None,
        token_tls: LiveValue[ssl.SSLContext] | None = None,
    ) -> None:
        self.value, self.tls, self.token_tls = value, tls, token_tls
        self.until: float | None = None


def find_secret(webhook: Webhook) -> tuple[KeyPath, Secret, bool] | None:
    """The place of the value of `auth`: its key in the webhook, the place, and whether the value is a token."""
    auth = webhook.auth
    if auth is None:
        return None
    if auth.bearer is not None:
        return ("auth", "bearer"), auth.bearer, True
    if auth.header is not None:
        return ("auth", "header", "value"), auth.header.value, False
    assert auth.oauth is not None
    return ("auth", "oauth", "client_secret"), auth.oauth.client_secret, False


def _find_tls(webhook: Webhook) -> Iterator[tuple[KeyPath, Tls]]:
    if webhook.tls is not None:
        yield ("tls",), webhook.tls
    if webhook.auth is not None and webhook.auth.oauth is not None and webhook.auth.oauth.tls is not None:
        yield ("auth", "oauth", "tls"), webhook.auth.oauth.tls


def read_credentials(
    webhook: Webhook, folder: Path, environ: Mapping[str, str]
) -> tuple[Credentials, list[tuple[KeyPath, str]]]:
    """The credentials, and the mistakes: each with its key in the webhook, for a person. Blocking."""
    credentials, mistakes = Credentials(), list[tuple[KeyPath, str]]()
    if (place := find_secret(webhook)) is not None:
        key, secret, token = place
        try:
            value, credentials.until = read_noted(secret, folder, environ, token=token)
            credentials.value = LiveValue(value)
        except BadCredential as error:
            mistakes.append((key, str(error)))
    for key, tls in _find_tls(webhook):
        try:
            live = LiveValue(read_tls(tls, folder)[1])
        except BadCredential as error:
            mistakes.append((key, str(error)))
            continue
        if key == ("tls",):
            credentials.tls = live
        else:
            credentials.token_tls = live
    return credentials, mistakes


def watch_credentials(
    name: str,
    webhook: Webhook,
    folder: Path,
    credentials: Credentials,
    clock: Callable[[], float] = time.monotonic,
) -> list[FileWatch[Any]]:
    """Keep `credentials` equal to their files; a value in an environment variable cannot change. `load` raises BadCredential.

    name: `pipe/destination`. The metrics show when tokens, certificates and secrets with a note end.
    """
    watches: list[FileWatch[Any]] = []
    place = find_secret(webhook)
    if place is not None and credentials.value is not None:
        key, secret, token = place
        if secret.file is None:
            _show_term(credentials.value.current, (name, key))
            show_secret(name, _join(key), credentials.until, None)
        else:
            read = partial(_read_value, secret, folder, token, (name, key))
            watches.append(_watch(name, key, read, credentials.value, clock))
    for key, tls in _find_tls(webhook):
        live = credentials.tls if key == ("tls",) else credentials.token_tls
        if live is not None:
            watches.append(_watch(name, key, partial(_read_tls, tls, folder, (name, key)), live, clock))
    return watches


def _read_value(
    secret: Secret, folder: Path, token: bool, whose: tuple[str, KeyPath], known: bytes
) -> tuple[bytes, str] | None:
    value, until = read_noted(secret, folder, {}, token=token)
    digest = hashlib.sha256(f"{value}\n{until}".encode()).digest()
    if digest == known:
        return None
    _show_term(value, whose)
    name, key = whose
    show_secret(name, _join(key), until, changed_at(folder / str(secret.file)))
    return digest, value


def _show_term(value: str, whose: tuple[str, KeyPath]) -> None:
    """A token without a date of issue counts from now."""
    name, key = whose
    labels = name, _join(key)
    term = term_of_token(value)
    if term is None:
        metrics.TOKEN_EXPIRY.remove(*labels)
        metrics.TOKEN_ISSUED.remove(*labels)
        return
    issued, until = term
    metrics.TOKEN_EXPIRY.labels(*labels).set(until)
    metrics.TOKEN_ISSUED.labels(*labels).set(time.time() if issued is None else issued)


def _read_tls(tls: Tls, folder: Path, whose: tuple[str, KeyPath], known: bytes) -> tuple[bytes, ssl.SSLContext] | None:
    if known and digest_files(tls, folder) == known:
        return None
    found = read_tls(tls, folder)
    name, key = whose
    for part, until in expiries_of(tls, folder).items():
        metrics.CERTIFICATE_EXPIRY.labels(name, _join((*key, part))).set(until)
    return found


def _join(key: KeyPath) -> str:
    return ".".join(map(str, key))


def expiries_of(tls: Tls, folder: Path) -> dict[str, float]:
    """When `certificate` (the first one in the file) and `ca` (the one that ends last) end, in seconds since the epoch.

    Blocking. Without an end that cannot be read: it is no reason to refuse a file that OpenSSL can use.
    """
    found: dict[str, float] = {}
    choices: tuple[tuple[str, Path | None, Callable[[list[float]], float]], ...] = (
        ("certificate", tls.certificate, itemgetter(0)),
        ("ca", tls.ca, max),
    )
    for part, file, choose in choices:
        if file is not None:
            with suppress(ValueError, IndexError):
                found[part] = choose(untils_of_pem(read_pem(folder / file, private=False)))
    return found


def _watch(
    name: str,
    key: KeyPath,
    read: Callable[[bytes], tuple[bytes, Value] | None],
    live: LiveValue[Value],
    clock: Callable[[], float],
) -> FileWatch[Value]:
    word = ".".join(map(str, key))

    def use(current: Value) -> None:
        live.current = current
        log.info("credential_loaded", name=name, key=word)

    return FileWatch(
        f"{name}: {word}",
        read,
        use,
        expected=BadCredential,
        failed=metrics.CREDENTIALS_FAILURES.labels(name, word).inc,
        stale=_STALE,
        age=metrics.CREDENTIALS_AGE.labels(name, word),
        clock=clock,
    )
