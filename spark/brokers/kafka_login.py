"""The security file (`services.core.security.kafka`) as properties of Kafka's Java clients, which Spark's connector uses.

Spark shows options of the connector: the plan of each write prints all of them. So a secret is never in an option. The options
have the places of secrets, and our classes for Java (`spark/jvm/kafka`) read these for each new connection, on the host of the
task. Spark keeps the clients that it has made, and a rotation reaches these, too.
"""

import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path

import structlog

from services.core.broker.errors import Unavailable
from services.core.pipe_file.webhook import Secret, Tls
from services.core.security.credentials import BadCredential, read_pem
from services.core.security.kafka import KafkaSecurity, Login, Sasl, UnusableSecurity, load_security, read_login
from services.core.yaml_source import BadConfiguration

log = structlog.get_logger()

_SASL = "org.apache.kafka.common.security"
_MODULES = {
    "PLAIN": f"{_SASL}.plain.PlainLoginModule",
    "SCRAM-SHA-256": f"{_SASL}.scram.ScramLoginModule",
    "SCRAM-SHA-512": f"{_SASL}.scram.ScramLoginModule",
    "OAUTHBEARER": f"{_SASL}.oauthbearer.OAuthBearerLoginModule",
}
_KEY = re.compile(rb"-----BEGIN PRIVATE KEY-----.+?-----END PRIVATE KEY-----", re.DOTALL)


class ClientLogin:
    """The login of all clients of a cluster, as properties. path: of the security file; None: no login, and no properties.

    Thread-safe. Blocking, up to 0.1 s.
    """

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()
        self._known: Login | None = None

    def properties(self) -> dict[str, str]:
        """As the files are now; while these cannot be used, as they were before. Raises Unavailable when they never could: the
        same call may succeed later."""
        if self._path is None:
            return {}
        with self._lock:
            try:
                login = read_login(self._path, os.environ, self._known)
                if login is not self._known:
                    _check_keys(login.security, self._path.parent)
                self._known = login
            except (UnusableSecurity, BadCredential) as error:
                if self._known is None:
                    raise Unavailable(str(error)) from None
                log.warning("kafka_login_unusable", problem=str(error), hint="new connections fail until it is usable")
            return to_properties(self._known.security, self._path.parent)


def needs_aws(path: Path) -> bool:
    """Whether the login needs AWS's SDK. False when the file cannot be used: `properties` says so. Blocking."""
    try:
        sasl = load_security(path).sasl
    except BadConfiguration:
        return False
    return sasl is not None and sasl.region is not None


def to_properties(security: KafkaSecurity, folder: Path) -> dict[str, str]:
    """folder: of the file."""
    found: dict[str, str] = {"security.protocol": security.protocol}
    if security.files is not None:
        found["ssl.engine.factory.class"] = "penstock.kafka.Tls"
        found |= {f"penstock.tls.{name}": path for name, path in _paths(security.files, folder).items()}
    if security.sasl is not None:
        mechanism = "OAUTHBEARER" if security.sasl.user is None else security.sasl.mechanism
        options = _options(security.sasl, folder)
        words = " ".join(f"{name}={_quote(value)}" for name, value in options.items())
        found["sasl.mechanism"] = mechanism
        found["sasl.jaas.config"] = f"{_MODULES[mechanism]} required {words};"
        found["sasl.client.callback.handler.class"] = "penstock.kafka.Login"
        found["sasl.login.callback.handler.class"] = "penstock.kafka.NoLogin"
    return found


def _options(sasl: Sasl, folder: Path) -> dict[str, str]:
    """Of the JAAS entry, for `Login.scala`."""
    if sasl.region is not None:
        return {"region": sasl.region}
    if sasl.oauth is None:
        assert sasl.user is not None
        assert sasl.password is not None
        return {"user": sasl.user, **_place(sasl.password, folder)}
    given: Mapping[str, str | None] = {
        name: getattr(sasl.oauth, name) for name in ("token_url", "client_id", "scope", "audience", "resource")
    }
    found = {name: value for name, value in given.items() if value is not None}
    if sasl.oauth.tls is not None:
        found |= {f"token_{name}": path for name, path in _paths(sasl.oauth.tls, folder).items()}
    return found | _place(sasl.oauth.client_secret, folder)


def _place(secret: Secret, folder: Path) -> dict[str, str]:
    if secret.env is not None:
        return {"env": secret.env}
    assert secret.file is not None
    return {"file": str(folder / secret.file)}


def _paths(files: Tls, folder: Path) -> dict[str, str]:
    given = {"ca": files.ca, "certificate": files.certificate, "key": files.key}
    return {name: str(folder / path) for name, path in given.items() if path is not None}


def _quote(text: str) -> str:
    """As JAAS has it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _check_keys(security: KafkaSecurity, folder: Path) -> None:
    """Java reads one form only. Raises BadCredential."""
    oauth = None if security.sasl is None else security.sasl.oauth
    for files in filter(None, (security.files, None if oauth is None else oauth.tls)):
        if files.certificate is None:
            continue
        key = folder / (files.key or files.certificate)
        if _KEY.search(read_pem(key, private=True)) is None:
            raise BadCredential(
                f"{key} has no key that Java reads (PKCS#8). Try: openssl pkcs8 -topk8 -nocrypt -in {key} -out {key}.new"
            )
