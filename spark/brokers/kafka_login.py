"""The security file (`services.core.kafka_security`) as properties of Kafka's Java clients, which Spark's connector uses.

Spark shows options of the connector: the plan of each write prints all of them. So a secret is never in an option. It is in a
file of a private folder, and the option names the file: each client reads it when it is made (KIP-297). So the tasks must run on
this machine.
"""

import os
import re
import threading
from pathlib import Path

from services.core.broker.errors import Unavailable
from services.core.credentials import BadCredential, read_pem
from services.core.kafka_security import Login, UnusableSecurity, read_login
from services.core.pipe_webhook import Tls

_PROVIDER = {
    "config.providers": "penstock",
    "config.providers.penstock.class": "org.apache.kafka.common.config.provider.DirectoryConfigProvider",
}
_MODULES = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_KEY = re.compile(r"-----BEGIN PRIVATE KEY-----.+?-----END PRIVATE KEY-----", re.DOTALL)


def client_properties(path: Path | None, folder: Path) -> dict[str, str]:
    """Of the login as the files are now; {} without a file. folder: private, for the secrets. Blocking.

    Raises Unavailable: the same call may succeed later.
    """
    if path is None:
        return {}
    try:
        login = read_login(path, os.environ)
        files = login.security.files
        secret = _sasl(login) | ({} if files is None else _stores(files, path.parent))
    except (UnusableSecurity, BadCredential) as error:
        raise Unavailable(str(error)) from None
    shown = {"security.protocol": login.security.protocol} | _PROVIDER
    shown |= {name: "PEM" for name in ("ssl.truststore.type", "ssl.keystore.type") if files is not None}
    if login.security.sasl is not None:
        shown["sasl.mechanism"] = login.security.sasl.mechanism
    return shown | {name: _write(folder, name, value) for name, value in secret.items()}


def _write(folder: Path, name: str, value: str) -> str:
    """Put the value into a file of this name, at once. Gives the reference to it, for an option."""
    new = folder / f"{name}.{threading.get_ident()}"
    with open(new, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(value)
    new.replace(folder / name)
    return f"${{penstock:{folder}:{name}}}"


def _sasl(login: Login) -> dict[str, str]:
    sasl = login.security.sasl
    if sasl is None:
        return {}
    jaas = f"{_MODULES[sasl.mechanism]} required username={_quote(sasl.user)} password={_quote(login.password)};"
    return {"sasl.jaas.config": jaas}


def _quote(text: str) -> str:
    """As JAAS has it."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _stores(files: Tls, folder: Path) -> dict[str, str]:
    """Their content, by property."""
    found: dict[str, str] = {}
    if files.ca is not None:
        found["ssl.truststore.certificates"] = _certificates(folder / files.ca)
    if files.certificate is not None:
        key = folder / (files.key or files.certificate)
        own = _KEY.search(read_pem(key, private=True).decode("ascii", errors="replace"))
        if own is None:
            raise BadCredential(
                f"{key} has no key that Java reads (PKCS#8). Try: openssl pkcs8 -topk8 -nocrypt -in {key} -out {key}.new"
            )
        chain = _certificates(folder / files.certificate)
        found |= {"ssl.keystore.certificate.chain": chain, "ssl.keystore.key": own[0]}
    return found


def _certificates(path: Path) -> str:
    return "\n".join(_CERTIFICATE.findall(read_pem(path, private=False).decode("ascii", errors="replace")))
