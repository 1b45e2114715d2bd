"""The tokens with which we log in to Kafka by OAUTHBEARER: of an OAuth token server, or signed by AWS's credentials (MSK).

A connection needs a token only when it is opened. So a token that has expired costs the cluster one new connection per client,
each with a token that is still good, and the token server one request for all of them (`services.core.security.oauth`).
"""

import asyncio
import ssl
import time
from collections.abc import Callable
from ipaddress import ip_network

from aiokafka.abc import AbstractTokenProvider

from services.core import metrics
from services.core.http.client import HttpClient, Response
from services.core.http.net_guard import NetPolicy
from services.core.http.resolver import Resolver
from services.core.pipe_file.webhook import OAuth
from services.core.security.authorization import Credential, NoCredential
from services.core.security.credentials import LiveValue
from services.core.security.kafka import Login
from services.core.security.msk_token import NoAwsCredentials, make_token
from services.core.security.oauth import MAX_TOKEN_RESPONSE, OAuthClient

_TIMEOUT_S = 5.0
"""Below the time of a request to the broker."""
_HEADERS = {"Accept": "application/json", "Content-Type": "application/x-www-form-urlencoded"}
_ANYWHERE = NetPolicy(allow=(ip_network("0.0.0.0/0"), ip_network("::/0")))
"""The operator names the token server, not a customer."""


class NoToken(Exception):
    """There is no token. The text is for a person, and shows no secret."""


class Token(AbstractTokenProvider):  # type: ignore[misc]  # aiokafka has no types
    """One token, for one connection."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    async def token(self) -> str:
        """For aiokafka."""
        return self._text

    def __repr__(self) -> str:
        return "Token(***)"


class Tokens:
    """Those of one login. clock: monotonic seconds. Not thread-safe."""

    def __init__(self, login: Login, clock: Callable[[], float] = time.monotonic) -> None:
        sasl = login.security.sasl
        assert sasl is not None
        self._region = sasl.region
        self._client: OAuthClient | None = None
        if sasl.oauth is not None:
            count = lambda outcome: metrics.BROKER_TOKEN_REQUESTS.labels(outcome).inc()  # noqa: E731
            post = _Poster(sasl.oauth, login.token_context)
            self._client = OAuthClient("kafka", sasl.oauth, LiveValue(login.password), post, count, clock)
        self._used: Credential | None = None
        self._is_refused = False

    async def get(self) -> Token:
        """One for the next connection. Raises NoToken."""
        try:
            if self._client is None:
                assert self._region is not None
                return Token(await asyncio.to_thread(make_token, self._region))
            if self._is_refused and self._used is not None:
                await self._client.renew(self._used)
            self._used, self._is_refused = await self._client.get(), False
            return Token(self._used.secret)
        except NoCredential as error:
            raise NoToken(str(error)) from None
        except NoAwsCredentials as error:
            raise NoToken(str(error)) from None

    def refuse(self) -> None:
        """The cluster did not accept the last one: the next is a new one."""
        self._is_refused = True


class _Poster:
    """The token server, with a connection for each of the rare requests."""

    def __init__(self, config: OAuth, context: ssl.SSLContext | None) -> None:
        self._config, self._context = config, context

    async def post(self, headers: bytes, body: bytes) -> Response:
        context = self._context
        client = HttpClient(
            self._config.token_url,
            policy=_ANYWHERE,
            resolver=Resolver(),
            timeout=_TIMEOUT_S,
            headers=_HEADERS,
            tls=None if context is None else lambda: context,
            max_body=MAX_TOKEN_RESPONSE,
        )
        with client:
            return await client.post(headers, body)
