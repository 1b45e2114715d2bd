"""The security file (`services.core.kafka_security`) as properties of Kafka's Java clients, which Spark's connector uses.

Spark shows options of the connector: the plan of each write prints all of them. So a secret is never in an option. All of them
are in one file of a private folder, and the options name the file: each client reads it when it is made (KIP-297), once, so a
certificate and its key are always of one time. So the tasks must run on this machine.
"""

import os
import re
import shutil
import tempfile
import threading
from pathlib import Path

import structlog

from services.core.broker.errors import Unavailable
from services.core.credentials import BadCredential, read_certificates, read_pem
from services.core.kafka_security import Login, UnusableSecurity, read_login
from services.core.pipe_webhook import Tls

log = structlog.get_logger()

_PROVIDER = {
    "config.providers": "penstock",
    "config.providers.penstock.class": "org.apache.kafka.common.config.provider.FileConfigProvider",
}
_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "OAUTHBEARER": "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule",
}
_TOKENS = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"
"""Kafka's own client of a token server, which renews its tokens."""
_KEY = re.compile(r"-----BEGIN PRIVATE KEY-----.+?-----END PRIVATE KEY-----", re.DOTALL)
_FILE = "login.properties"


class ClientLogin:
    """The login of all clients of a cluster, as properties, and the private folder that their secrets are in.

    path: of the security file; None: no login, and no properties. Thread-safe. Blocking, up to 0.1 s.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: Login | None = None
        self._folder: Path | None = None
        self._properties: dict[str, str] = {}

    def properties(self) -> dict[str, str]:
        """Of the login as the files are now; of the last one that could be used, when these cannot.

        Raises Unavailable when there was none: the same call may succeed later.
        """
        if self._path is None:
            return {}
        with self._lock:
            try:
                login = read_login(self._path, os.environ, self._known)
                if login is not self._known:
                    self._use(login, self._path)
            except (UnusableSecurity, BadCredential) as error:
                if self._known is None:
                    raise Unavailable(str(error)) from None
                log.warning(
                    "kafka_login_unusable", problem=str(error), hint="the last one that was usable stays in use"
                )
            return self._properties

    def close(self) -> None:
        """Remove the secrets."""
        with self._lock:
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = self._known = None

    def _use(self, login: Login, path: Path) -> None:
        files = login.security.files
        secret = _sasl(login) | ({} if files is None else _stores(files, path.parent))
        if read_login(path, os.environ, login) is not login:
            raise BadCredential("the files changed while they were read")
        if self._folder is None:  # the variable, not what Python remembers of it: the scratch folder, which is removed
            self._folder = Path(tempfile.mkdtemp(prefix="kafka-login-", dir=os.environ.get("TMPDIR")))
        new, used = self._folder / f"{_FILE}.new", self._folder / _FILE
        with open(new, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.writelines(f"{name}={_escape(value)}\n" for name, value in secret.items())
        new.replace(used)
        shown = {"security.protocol": login.security.protocol} | _PROVIDER
        shown |= {name: "PEM" for name in ("ssl.truststore.type", "ssl.keystore.type") if files is not None}
        if login.security.sasl is not None:
            shown["sasl.mechanism"] = login.security.sasl.mechanism
            if (oauth := login.security.sasl.oauth) is not None:
                shown["sasl.login.callback.handler.class"] = _TOKENS
                shown["sasl.oauthbearer.token.endpoint.url"] = oauth.token_url
                shown["sasl.oauthbearer.header.urlencode"] = "true"  # as our own client, and RFC 6749
        self._properties = shown | {name: f"${{penstock:{used}:{name}}}" for name in secret}
        self._known = login


def _escape(value: str) -> str:
    """As java.util.Properties has it."""
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def _sasl(login: Login) -> dict[str, str]:
    sasl = login.security.sasl
    if sasl is None:
        return {}
    if sasl.oauth is not None:
        if sasl.oauth.audience or sasl.oauth.resource or sasl.oauth.tls:
            raise BadCredential("a transform's client of a token server has no audience, resource and tls. Try: SCRAM")
        given = {"clientId": sasl.oauth.client_id, "clientSecret": login.password, "scope": sasl.oauth.scope}
    elif sasl.user is not None:
        given = {"username": sasl.user, "password": login.password, "scope": None}
    else:
        raise BadCredential(f"a transform has no login by {sasl.mechanism}. Try: SCRAM, or a client certificate")
    options = " ".join(f"{name}={_quote(value)}" for name, value in given.items() if value is not None)
    return {"sasl.jaas.config": f"{_MODULES[sasl.mechanism]} required {options};"}


def _quote(text: str) -> str:
    """As JAAS has it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _stores(files: Tls, folder: Path) -> dict[str, str]:
    """Their content, by property."""
    found: dict[str, str] = {}
    if files.ca is not None:
        found["ssl.truststore.certificates"] = read_certificates(folder / files.ca)
    if files.certificate is not None:
        key = folder / (files.key or files.certificate)
        own = _KEY.search(read_pem(key, private=True).decode("ascii", errors="replace"))
        if own is None:
            raise BadCredential(
                f"{key} has no key that Java reads (PKCS#8). Try: openssl pkcs8 -topk8 -nocrypt -in {key} -out {key}.new"
            )
        chain = read_certificates(folder / files.certificate)
        found |= {"ssl.keystore.certificate.chain": chain, "ssl.keystore.key": own[0]}
    return found
