"""How connections to a Kafka with TLS or a login are opened, and what is said when the cluster refuses one, or we refuse it.

aiokafka opens a connection with what it was given when the client was made, and tries again ten times a second. Here each new
connection reads the files again, so a rotation needs no restart. A node that refused is left alone for `FIRST_HOLD_S`, twice
that after each further refusal, up to `LONGEST_HOLD_S`: some clusters lock a user out after a few wrong passwords. When one of
the files changes, it is asked again within a second.
"""

import asyncio
import os
import ssl
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import structlog
from aiokafka import errors as kafka

from services.core import metrics
from services.core.broker.kafka.tokens import NoToken, Tokens
from services.core.security.kafka import Login, UnusableSecurity, read_login, show_certificates
from services.core.times import format_time

log = structlog.get_logger()

FIRST_HOLD_S, LONGEST_HOLD_S = 5.0, 60.0
_READ_EVERY_S = 1.0
TRIAL_S = 5.0
"""So long others wait for the first connection to a node, which may be frozen; then the next of them tries."""
_EXPIRED, _WRONG_NAME, _WRONG_ADDRESS = 10, 62, 64
"""Of X509_V_ERR_…"""

Connect = Callable[..., Awaitable[Any]]
"""aiokafka's `create_conn`, without host and port."""


class RefusedError(kafka.KafkaConnectionError):  # type: ignore[misc]  # aiokafka has no types
    """A connection was refused. The text is for a person, and shows no secret."""


@dataclass(slots=True)
class _Refusal:
    """text: for a person. digest: of the login that was refused; b"": ask again soon. Times are on the clock. told_at: when
    somebody last did not get a connection because of it."""

    text: str
    digest: bytes
    holds_until: float
    read_at: float
    count: int
    told_at: float


@dataclass(slots=True)
class _Trial:
    """The first connection to a node. problem: of the network, which ended it; else None."""

    ended: asyncio.Event
    problem: str | None = None


class Access:
    """The way to one cluster; shared by all clients of a process. path: of the file that `?security=` names.

    Not thread-safe. clock: monotonic seconds.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._login: Login | None = None
        self._refusals: dict[tuple[str, int], _Refusal] = {}
        self._trials: dict[tuple[str, int], _Trial] = {}
        self._accepted_at: dict[tuple[str, int], float] = {}
        self._tokens: tuple[bytes, Tokens] | None = None
        """With the digest of the login that they are of."""

    def now(self) -> float:
        """For `problem_since`."""
        return self._clock()

    def problem_since(self, since: float, node: tuple[str, int] | None = None) -> str | None:
        """Why somebody got no connection since then to this node (None: to any), for a person; None when nobody was refused."""
        found = reversed(self._refusals.items())
        return next((known.text for at, known in found if known.told_at >= since and node in (None, at)), None)

    async def open(self, connect: Connect, host: str, port: int) -> Any:
        """A connection, made by `connect` with the settings of the login. Raises KafkaError, OSError."""
        node = (host, port)
        while (trial := self._trials.get(node)) is not None:
            try:
                async with asyncio.timeout(TRIAL_S):
                    await trial.ended.wait()
            except TimeoutError:
                if self._trials.get(node) is trial:
                    del self._trials[node]
            if trial.problem is not None:
                raise kafka.KafkaConnectionError(trial.problem)
        if self._login is not None and self._clock() < self._accepted_at.get(node, float("-inf")) + _READ_EVERY_S:
            return await self._connect(connect, node, self._login)
        trial = self._trials[node] = _Trial(asyncio.Event())
        try:
            return await self._try(connect, node)
        except RefusedError:
            raise
        except (kafka.KafkaError, OSError) as error:
            trial.problem = f"{host}:{port}: {str(error) or type(error).__name__}"
            raise
        finally:
            if self._trials.get(node) is trial:
                del self._trials[node]
            trial.ended.set()

    async def _try(self, connect: Connect, node: tuple[str, int]) -> Any:
        """As `open`, with the files as they are now, unless the node has refused just these."""
        now = self._clock()
        known = self._refusals.get(node)
        if known is not None and now < known.read_at + _READ_EVERY_S:
            known.told_at = now
            raise RefusedError(known.text)
        try:
            login = await asyncio.to_thread(read_login, self._path, os.environ, self._login)
        except UnusableSecurity as error:
            raise self._refuse(node, str(error), b"") from None
        self._login = login
        if known is not None and known.digest == login.digest and now < known.holds_until:
            known.read_at = known.told_at = now
            raise RefusedError(known.text)
        return await self._connect(connect, node, login)

    async def _connect(self, connect: Connect, node: tuple[str, int], login: Login) -> Any:
        host, port = node
        try:
            opened = await connect(**await self._settings(login))
        except NoToken as error:
            raise self._refuse(node, f"no login at Kafka: {error}. Try: correct sasl in {self._path}", b"") from None
        except (kafka.KafkaError, OSError) as error:
            text = self._explain(error, login, f"{host}:{port}")
            if text is None:
                raise
            # A connection that breaks may be a broker that restarts: it is asked again soon.
            raise self._refuse(node, text, b"" if isinstance(error, ConnectionError) else login.digest) from None
        except RuntimeError as error:  # uvloop's, for a connection that was just closed
            raise kafka.KafkaConnectionError(f"{host}:{port}: {error}") from error
        except Exception as error:  # an answer that no Kafka gives: aiokafka expects it nowhere, and would end a task
            raise self._refuse(
                node,
                f"{host}:{port} is no Kafka: {type(error).__name__}. Try: the port of a Kafka listener",
                login.digest,
            ) from None
        self._accepted_at[node] = self._clock()
        if self._refusals.pop(node, None) is not None:
            log.info("kafka_access_accepted", node=f"{host}:{port}")
        return opened

    def _refuse(self, node: tuple[str, int], text: str, digest: bytes) -> RefusedError:
        now, known = self._clock(), self._refusals.pop(node, None)
        if self._tokens is not None:
            self._tokens[1].refuse()
        self._accepted_at.pop(node, None)
        count = 1 + (known.count if known is not None and known.digest == digest else 0)
        hold = min(LONGEST_HOLD_S, FIRST_HOLD_S * 2 ** min(count - 1, 10))  # a float holds no 2 ** 1024
        self._refusals[node] = _Refusal(text, digest, now + hold, now, count, now)
        metrics.BROKER_ACCESS_REFUSED.inc()
        if known is None or known.text != text:
            log.warning("kafka_access_refused", node=f"{node[0]}:{node[1]}", problem=text)
        return RefusedError(text)

    async def _settings(self, login: Login) -> dict[str, Any]:
        """For aiokafka. Raises NoToken."""
        settings: dict[str, Any] = {"security_protocol": login.security.protocol, "ssl_context": login.context}
        sasl = login.security.sasl
        if sasl is not None and sasl.user is not None:
            settings |= {"sasl_mechanism": sasl.mechanism}
            settings |= {"sasl_plain_username": sasl.user, "sasl_plain_password": login.password}
        elif sasl is not None:
            if self._tokens is None or self._tokens[0] != login.digest:
                self._tokens = login.digest, Tokens(login)
            token = await self._tokens[1].get()
            settings |= {"sasl_mechanism": "OAUTHBEARER", "sasl_oauth_token_provider": token}
        return settings

    def _explain(self, error: BaseException, login: Login, where: str) -> str | None:
        """What to tell a person; None for an error of the network."""
        sasl = login.security.sasl
        if isinstance(error, kafka.SaslAuthenticationFailed) and sasl is not None and sasl.user is None:
            return (
                f"Kafka at {where} does not accept our token ({sasl.mechanism}). "
                f"Try: compare sasl in {self._path} with what the listener expects: issuer, audience, scope; and both clocks"
            )
        if isinstance(error, kafka.SaslAuthenticationFailed) and sasl is not None:
            return (
                f"Kafka at {where} does not accept user {sasl.user} with this password ({sasl.mechanism}). "
                f"Try: compare sasl in {self._path} and its password with the cluster's users"
            )
        if isinstance(error, kafka.UnsupportedSaslMechanismError | kafka.IllegalSaslStateError) and sasl is not None:
            return (
                f"the listener of Kafka at {where} has no login by {sasl.mechanism}. "
                f"Try: another sasl.mechanism in {self._path}, or the port of another listener"
            )
        if (found := _find_tls_error(error)) is not None:
            return self._explain_tls(found, login, where)
        if login.context is not None and isinstance(error, ConnectionResetError | ConnectionAbortedError):
            return f"{where} closed the connection before TLS was agreed. Try: the port of a listener with TLS"
        return None

    def _explain_tls(self, error: ssl.SSLError, login: Login, where: str) -> str:
        if isinstance(error, ssl.SSLCertVerificationError):
            if error.verify_code == _EXPIRED:
                remedy = "Try: a new certificate for that broker, or set the clock of this machine"
            elif error.verify_code in (_WRONG_NAME, _WRONG_ADDRESS):
                remedy = "Try: a name that is in the certificate, in --broker and in the cluster's advertised.listeners"
            else:
                remedy = f"Try: the authority that signed it, as tls: {{ca: FILE}} in {self._path}"
            return f"the certificate of Kafka at {where} is not accepted: {error.verify_message}. {remedy}"
        reason = str(error.reason or "no reason is known").lower().replace("_", " ")
        if ("alert" in reason and "certificate" in reason) or "unknown ca" in reason:
            if login.until is not None and login.until < time.time():
                ended = format_time(round(login.until * 1000))
                return (  # a broker in Java does not tell this reason
                    f"Kafka at {where} does not accept our client certificate: it expired at {ended}. "
                    f"Try: a new one in the file that tls.certificate in {self._path} names, or set the clock of this machine"
                )
            files = login.security.files
            ours = (
                "our client certificate"
                if files is not None and files.certificate
                else "us without a client certificate"
            )
            return (
                f"Kafka at {where} does not accept {ours}: {reason}. "
                f"Try: tls: {{certificate: FILE, key: FILE}} in {self._path}, signed by an authority that the cluster trusts"
            )
        return (
            f"no TLS with Kafka at {where}: {reason}. Try: the port of a listener with TLS, or no tls in {self._path}"
        )


def _find_tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """The error or its cause: a server that refuses our certificate says so after the handshake, and closes."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__
    return error


@cache
def access_by(path: Path | None) -> Access | None:
    """The one of this process for this file: its memory of refusals outlives the clients. None without a file."""
    if path is None:
        return None
    show_certificates(path)
    return Access(path)


def client_settings(access: Access | None) -> dict[str, Any]:
    """For aiokafka's clients, which pass the context on to `create_conn` (`aiokafka_client`)."""
    return {} if access is None else {"security_protocol": "SSL", "ssl_context": access}
