"""A real Kafka with TLS, logins and an authorizer: one broker with a listener for each way in."""

import base64
import json
import secrets
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from services.core.jvm.jars import KAFKA_SERVER, jar_set
from services.core.jvm.java import find_java
from services.core.jvm.kafka import FAST_START, KafkaCluster
from spark.jvm.classes import compiled_jar
from tests.support.authority import Authority
from tests.support.ports import free_port

START_S = 600.0
REGION = "eu-west-1"
BRIEF_S = 2
"""The longest life of a connection of the listener `brief` without a new login."""
_SASL = "org.apache.kafka.common.security"
OPERATOR = "operator"
"""A user who may do everything."""
ROTATED = "rotated"
"""Another one. Tests give it other passwords."""
CLIENTS = ("ingest", "expel", "retrier", "observer", "table", "autoscaler", "transform", "deployer")
"""Users without rights; a test gives them some."""
_LOGINS = ("plain", "scram", "stale", "oauth", "signed", "msk", "brief")
"""The listeners with a login."""
_MSK_TOKENS = Path(__file__).with_name("MskTokens.scala")


class SecuredKafka:
    """listeners: `tls` (wants a client certificate), `plain`, `scram`, `stale` (its certificate has expired; SCRAM), `oauth`: it
    takes tokens without a signature, and ends connections soon after their token has expired; `signed`: it takes those of
    `sign_token`, because Java's client wants a signature; `msk`: as `oauth`, with tokens that are signed by AWS's keys
    `aws_keys`, in REGION; and `brief`: as `scram`, and it wants a new login on each connection every BRIEF_S.

    Certificates are for the address 127.0.0.1, not for the name localhost. passwords: by user. A context manager that blocks.

    java_options: for speed, not FAST_START: Java's quick compiler encrypts at some 20 MB/s.
    """

    def __init__(self, folder: Path, java_options: Sequence[str] = FAST_START) -> None:
        self.folder = folder
        self.ours, self.foreign = Authority(folder / "ours"), Authority(folder / "foreign")
        self.client, self.foreign_client = self.ours.sign("client"), self.foreign.sign("client")
        self.expired_client = self.ours.sign("former", -1)
        self.passwords = {user: secrets.token_hex(12) for user in (OPERATOR, ROTATED, *CLIENTS)}
        scram = [
            f"SCRAM-SHA-{size}=[name={user},password={password}]"
            for user, password in self.passwords.items()
            for size in (256, 512)
        ]
        options = [part for each in scram for part in ("--add-scram", each)]
        self._signer = folder / "signer.key"
        keys = self._write_keys().as_uri()
        allowed = f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={keys}"
        self.aws_keys = {"AWS_ACCESS_KEY_ID": "AKIDEXAMPLE", "AWS_SECRET_ACCESS_KEY": secrets.token_hex(20)}
        kafka = tuple(jar for jar in jar_set(KAFKA_SERVER) if jar.name.startswith("kafka-clients"))
        self.cluster = KafkaCluster(
            folder / "kafka",
            brokers=1,
            format_options=options,
            java_options=(*java_options, allowed),
            more_jars=[compiled_jar("penstock-msk-tokens", [_MSK_TOKENS], beside=kafka)],
        )
        self.ports = {name: free_port() for name in ("tls", *_LOGINS)}
        self._keys = keys
        self.cluster.settings.update(self._settings())

    def _settings(self) -> dict[str, str]:
        node = self.cluster.brokers[1].node
        good, stale = self.ours.sign("broker", place="IP:127.0.0.1"), self.ours.sign("old", -1, "IP:127.0.0.1")
        at = {"BROKER": node.port} | {name.upper(): port for name, port in self.ports.items()}
        advertised = ",".join(f"{name}://127.0.0.1:{port}" for name, port in at.items())
        users = " ".join(f'user_{user}="{password}"' for user, password in self.passwords.items())
        settings = {
            "listeners": f"{advertised},CONTROLLER://127.0.0.1:{node.controller_port}",
            "advertised.listeners": advertised,
            "listener.security.protocol.map": ",".join(
                ("BROKER:PLAINTEXT", "CONTROLLER:PLAINTEXT", "TLS:SSL", *(f"{one.upper()}:SASL_SSL" for one in _LOGINS))
            ),
            "ssl.keystore.type": "PEM",
            "ssl.truststore.type": "PEM",
            "ssl.keystore.location": str(good),
            "ssl.truststore.location": str(self.ours.ca),
            "listener.name.tls.ssl.client.auth": "required",
            "listener.name.stale.ssl.keystore.type": "PEM",
            "listener.name.stale.ssl.keystore.location": str(stale),
            "listener.name.plain.sasl.enabled.mechanisms": "PLAIN",
            "listener.name.plain.plain.sasl.jaas.config": f"{_SASL}.plain.PlainLoginModule required {users};",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:ANONYMOUS;User:{OPERATOR};User:{ROTATED};User:CN=client",
        }
        for name in ("oauth", "signed", "msk"):
            settings |= self._token_settings(f"listener.name.{name}", name)
        for name in ("scram", "stale", "brief"):
            settings[f"listener.name.{name}.sasl.enabled.mechanisms"] = "SCRAM-SHA-256,SCRAM-SHA-512"
            for size in (256, 512):
                module = f"{_SASL}.scram.ScramLoginModule required;"
                settings[f"listener.name.{name}.scram-sha-{size}.sasl.jaas.config"] = module
                if name == "brief":
                    settings[f"listener.name.{name}.scram-sha-{size}.connections.max.reauth.ms"] = str(BRIEF_S * 1000)
        return settings

    def _token_settings(self, listener: str, kind: str) -> dict[str, str]:
        own, module = f"{listener}.oauthbearer", f"{_SASL}.oauthbearer.OAuthBearerLoginModule required"
        settings = {
            f"{listener}.sasl.enabled.mechanisms": "OAUTHBEARER",
            f"{own}.sasl.jaas.config": f'{module} unsecuredLoginStringClaim_sub="broker";',
            f"{own}.connections.max.reauth.ms": "60000",
        }
        handler = f"{own}.sasl.server.callback.handler.class"
        if kind == "signed":
            settings[handler] = f"{_SASL}.oauthbearer.OAuthBearerValidatorCallbackHandler"
            settings[f"{own}.sasl.oauthbearer.jwks.endpoint.url"] = self._keys
        elif kind == "msk":
            known = {"id": self.aws_keys["AWS_ACCESS_KEY_ID"], "secret": self.aws_keys["AWS_SECRET_ACCESS_KEY"]}
            known |= {"region": REGION, "principal": OPERATOR}
            words = " ".join(f'{name}="{value}"' for name, value in known.items())
            settings[f"{own}.sasl.jaas.config"] = f'{module} unsecuredLoginStringClaim_sub="broker" {words};'
            settings[handler] = "penstock.msk.MskTokens"
        return settings

    def _write_keys(self) -> Path:
        """The public key of `sign_token`, as a token server publishes it."""
        subprocess.run(["openssl", "genrsa", "-out", str(self._signer), "2048"], check=True, capture_output=True)
        said = subprocess.run(
            ["openssl", "rsa", "-in", str(self._signer), "-noout", "-modulus"], check=True, capture_output=True
        ).stdout
        modulus = base64.urlsafe_b64encode(bytes.fromhex(said.decode().partition("=")[2])).rstrip(b"=").decode()
        path = self.folder / "keys.json"
        path.write_text(json.dumps({"keys": [{"kty": "RSA", "kid": "1", "alg": "RS256", "n": modulus, "e": "AQAB"}]}))
        return path

    def sign_token(self) -> str:
        """A token for the operator that lasts ten minutes. Blocking."""
        now = int(time.time())
        claims = {"sub": OPERATOR, "iat": now, "exp": now + 600}
        parts = [json.dumps(part).encode() for part in ({"alg": "RS256", "kid": "1"}, claims)]
        signed = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
        sign = ["openssl", "dgst", "-sha256", "-sign", str(self._signer)]
        signature = subprocess.run(sign, input=signed, check=True, capture_output=True).stdout
        return b".".join((signed, base64.urlsafe_b64encode(signature).rstrip(b"="))).decode()

    def rotate(self, user: str) -> None:
        """Give a user another password for SCRAM-SHA-512. The files of clients have the former one. Blocking: seconds."""
        self.passwords[user] = secrets.token_hex(12)
        options = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", ":".join(map(str, jar_set(KAFKA_SERVER)))]
        command = [str(find_java().executable), *options, "kafka.admin.ConfigCommand", "--bootstrap-server"]
        command += [self.cluster.bootstrap, "--alter", "--entity-type", "users", "--entity-name", user]
        command += ["--add-config", f"SCRAM-SHA-512=[password={self.passwords[user]}]"]
        subprocess.run(command, check=True, capture_output=True, timeout=START_S)

    def address(self, listener: str, host: str = "127.0.0.1") -> str:
        """host:port of a listener."""
        return f"{host}:{self.ports[listener]}"

    def url(self, listener: str, security: Path, host: str = "127.0.0.1") -> str:
        """The `--broker` of a client with this file."""
        return f"kafka://{self.address(listener, host)}?security={security}"

    def write(self, folder: Path, mechanism: str = "SCRAM-SHA-512", user: str = OPERATOR, **content: Any) -> Path:
        """The file of a client in a new folder, with the password in a file beside it. content: in place of its keys."""
        folder.mkdir()
        (folder / "password").write_text(self.passwords[user])
        (folder / "password").chmod(0o600)
        sasl = {"mechanism": mechanism, "user": user, "password": {"file": "password"}}
        written: Mapping[str, Any] = {"tls": {"ca": str(self.ours.ca)}, "sasl": sasl} | content
        path = folder / "kafka.yaml"
        path.write_text(json.dumps({key: value for key, value in written.items() if value is not None}))
        return path

    def __enter__(self) -> Self:
        self.cluster.start(timeout_s=START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.stop(grace_s=0)
