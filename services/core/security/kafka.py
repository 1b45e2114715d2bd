"""How a fleet reaches a Kafka that wants TLS or a login: one file, which `?security=` in the broker's URL names.

    kafka://kafka-1:9093,kafka-2:9093?security=/etc/penstock/kafka.yaml

    tls: {ca: company-ca.pem}
    sasl: {mechanism: SCRAM-SHA-512, user: penstock, password: {file: kafka.password}}

The file has places of secrets, never secrets. Services, the command line, the autoscaler and Spark's connector read it and the
files that it names; paths in it are relative to its folder. Everything is read again for each new connection.
"""

import asyncio
import hashlib
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from services.core.metrics import CERTIFICATE_EXPIRY
from services.core.pipe_file.webhook import OAuth, Secret, StrictModel, Tls
from services.core.security.credentials import (
    BadCredential,
    digest_files,
    expiries_of,
    read_noted,
    read_tls,
    read_value,
)
from services.core.security.expiry import show_secret
from services.core.security.file_watch import changed_at
from services.core.yaml_source import BadConfiguration, load_yaml, validate_document

OPTION = "security"
NAME = "kafka"
"""In metrics, in place of `pipe/destination`."""
_LIMIT_S = 2.0
"""A disk that does not answer must not hold up the other metrics."""
Protocol = Literal["SSL", "SASL_PLAINTEXT", "SASL_SSL"]
"""Kafka's `security.protocol`."""
Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "AWS_MSK_IAM"]
"""AWS_MSK_IAM is ours: on the wire it is OAUTHBEARER, with a token that AWS's credentials sign."""
_REGION = r"[a-z]{2}(-[a-z]+)+-[0-9]+"


class Sasl(StrictModel):
    """The login: with user and password, with `oauth`, or with `region`, as the mechanism has it."""

    mechanism: Mechanism = Field(description="As the cluster's listener has it.")
    user: str | None = Field(
        None, min_length=1, max_length=500, description="The name of the user.", examples=["penstock"]
    )
    password: Secret | None = Field(
        None, description="The place of the password.", examples=[{"file": "kafka.password"}]
    )
    oauth: OAuth | None = Field(None, description="OAUTHBEARER: the token server and our client there.")
    region: str | None = Field(
        None, pattern=_REGION, description="AWS_MSK_IAM: the region of the cluster.", examples=["eu-west-1"]
    )

    @field_validator("user")
    @classmethod
    def _one_line(cls, user: str | None) -> str | None:
        if user is not None and not user.isprintable():
            raise ValueError("one line of printable characters is needed")
        return user

    @field_validator("oauth")
    @classmethod
    def _open_url(cls, oauth: OAuth | None) -> OAuth | None:
        if oauth is None:
            return None
        parts = urlsplit(oauth.token_url)
        if parts.scheme not in ("https", "http") or not parts.hostname:
            raise ValueError("token_url: a URL with https:// or http:// is needed")
        return oauth

    @model_validator(mode="after")
    def _complete(self) -> Self:
        needed = {"OAUTHBEARER": {"oauth"}, "AWS_MSK_IAM": {"region"}}.get(self.mechanism, {"user", "password"})
        given = {name for name in ("user", "password", "oauth", "region") if getattr(self, name) is not None}
        if given != needed:
            raise ValueError(f"{self.mechanism} needs {' and '.join(sorted(needed))}, and nothing else")
        return self

    @property
    def secret(self) -> Secret | None:
        """The place of the password, or of our secret at the token server. None: AWS's credentials."""
        return self.password if self.oauth is None else self.oauth.client_secret


class KafkaSecurity(StrictModel):
    """The file. tls: `system` trusts the authorities of the machine; `{ca: FILE}` those of a file."""

    tls: Tls | Literal["system"] | None = Field(
        None, description="TLS: `system`, or files as for a webhook.", examples=[{"ca": "company-ca.pem"}]
    )
    sasl: Sasl | None = Field(None, description="The login. Absent: none, or the client certificate.")

    @model_validator(mode="after")
    def _safe(self) -> Self:
        if self.tls is None and self.sasl is None:
            raise ValueError("tls or sasl is needed. Try: tls: system")
        if self.tls is None and self.sasl is not None and not self.sasl.mechanism.startswith("SCRAM"):
            shown = "password" if self.sasl.mechanism == "PLAIN" else "token"
            raise ValueError(f"without TLS the network sees the {shown} of {self.sasl.mechanism}. Try: tls: system")
        return self

    @property
    def protocol(self) -> Protocol:
        """As Kafka calls it."""
        if self.sasl is None:
            return "SSL"
        return "SASL_PLAINTEXT" if self.tls is None else "SASL_SSL"

    @property
    def files(self) -> Tls | None:
        """Of TLS; None for the machine's authorities, and without TLS."""
        return self.tls if isinstance(self.tls, Tls) else None


@dataclass(frozen=True, slots=True, repr=False)
class Login:
    """What one connection needs. digest: of all that was read. password: or our secret at the token server; "" without one.
    context: None without TLS. token_context: for the token server, when it has files of its own. until: when our certificate
    ends, in seconds since the epoch; None without one, and when it is not known."""

    security: KafkaSecurity
    password: str
    context: ssl.SSLContext | None
    digest: bytes
    token_context: ssl.SSLContext | None = None
    until: float | None = None

    def __repr__(self) -> str:
        return "Login(***)"


class UnusableSecurity(ValueError):
    """The file, or one that it names, cannot be used. The message is for a person; it never shows a secret."""


def parse_security_path(text: str) -> Path:
    """The path in a broker's URL. Raises ValueError."""
    if not text.startswith("/"):
        raise ValueError(
            f"{OPTION} in the Kafka URL is the absolute path of a file. Try: {OPTION}=/etc/penstock/kafka.yaml"
        )
    return Path(text)


def load_security(path: Path) -> KafkaSecurity:
    """The file at `path`. Blocking. Raises BadConfiguration with every mistake and its line."""
    return validate_document(load_yaml(path), KafkaSecurity)


def read_login(path: Path, environ: Mapping[str, str], known: Login | None = None) -> Login:
    """What a new connection needs, as the files are now; `known` itself while nothing has changed since.

    Blocking, up to 0.1 s. Raises UnusableSecurity.
    """
    try:
        security = load_security(path)
        folder = path.parent
        secret = None if security.sasl is None else security.sasl.secret
        password = "" if secret is None else read_value(secret, folder, environ)
        token_tls = None if security.sasl is None or security.sasl.oauth is None else security.sasl.oauth.tls
        found = [b"" if tls is None else digest_files(tls, folder) for tls in (security.files, token_tls)]
        parts = (security.model_dump_json().encode(), password.encode(), *found)
        digest = hashlib.sha256(b"".join(b"%d:%b" % (len(part), part) for part in parts)).digest()
        if known is not None and known.digest == digest:
            return known
        token_context = None if token_tls is None else read_tls(token_tls, folder)[1]
        until = None if security.files is None else expiries_of(security.files, folder).get("certificate")
        return Login(security, password, _context_of(security, folder), digest, token_context, until)
    except (BadConfiguration, BadCredential) as error:
        raise UnusableSecurity(str(error)) from None


def _context_of(security: KafkaSecurity, folder: Path) -> ssl.SSLContext | None:
    if security.tls is None:
        return None
    return ssl.create_default_context() if security.files is None else read_tls(security.files, folder, http=False)[1]


_shown: set[Path] = set()
_asked: set[Path] = set()
"""They are being read in a thread."""


def show_certificates(path: Path) -> None:
    """Show when the certificates and the secret of this file end, at each `measure_certificates` from now on."""
    _shown.add(path)


async def measure_certificates() -> None:
    """Set the metric from the files as they are now; a connection may live longer than its certificate. What cannot be read, or
    not within two seconds, keeps its last figure: `Access` says so, and counts."""
    await asyncio.gather(*map(_measure, _shown))


async def _measure(path: Path) -> None:
    if path in _asked:
        return
    _asked.add(path)
    asking = asyncio.create_task(_ask(path))
    done, _ = await asyncio.wait({asking}, timeout=_LIMIT_S)  # never cancelled: the thread may not be free yet
    for task in done:
        task.result()


async def _ask(path: Path) -> None:
    try:
        found, secret = await asyncio.to_thread(_read_expiries, path)
    except BadConfiguration:
        return
    finally:
        _asked.discard(path)
    show_secret(NAME, "sasl", *secret)
    for part in ("certificate", "ca"):
        if part in found:
            CERTIFICATE_EXPIRY.labels(NAME, f"tls.{part}").set(found[part])
        else:
            CERTIFICATE_EXPIRY.remove(NAME, f"tls.{part}")


def _read_expiries(path: Path) -> tuple[dict[str, float], tuple[float | None, float | None]]:
    """Those of the certificates; and of the secret, when it ends by its note, and when its file was changed."""
    security = load_security(path)
    secret = None if security.sasl is None else security.sasl.secret
    files = security.files
    return {} if files is None else expiries_of(files, path.parent), _term_of(secret, path.parent)


def _term_of(secret: Secret | None, folder: Path) -> tuple[float | None, float | None]:
    """What cannot be read has no date: each login says so."""
    if secret is None:
        return None, None
    written = None if secret.file is None else changed_at(folder / secret.file)
    try:
        return read_noted(secret, folder, os.environ)[1], written
    except BadCredential:
        return None, written
