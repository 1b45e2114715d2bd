"""The webhook of a pipe file: its URL, its secrets and certificates, and how requests are batched, signed and retried."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from services.core.units import Duration, Size

_SECRET_PARAMETER = re.compile(r"secret|passw|pwd|token|key|sig|auth|credential|assertion|code|jwt", re.IGNORECASE)
_PLACE = "Try: client_id, and client_secret: {file: oauth-client.secret} or {env: OAUTH_SECRET}"


Body = Literal["cloudevents", "json", "ndjson"]
"""The formats of a request's body; `services/expel/webhook/body.py` writes them."""


class StrictModel(BaseModel):
    """A part of the pipe file. Unknown keys are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def require_one_of(self, *keys: str, remedy: str = "") -> None:
        """Raises ValueError unless exactly one of these keys is there."""
        if sum(getattr(self, key) is not None for key in keys) != 1:
            tried = f". Try: {remedy}" if remedy else ""
            raise ValueError(f"exactly one of {', '.join(keys[:-1])} and {keys[-1]} is needed{tried}")


class Secret(StrictModel):
    """The place of a secret. The secret itself is never in a pipe file."""

    file: Path | None = Field(
        None,
        description="A file that other users cannot read. It is read again when it changes. A signing secret's file has one "
        "whsec_… per line (newest first), any other file one line. A line `# expires: 2027-01-31` says when it ends.",
        examples=["webhook.secret"],
    )
    env: str | None = Field(
        None,
        pattern=r"^[A-Z][A-Z0-9_]*$",
        description="An environment variable with the secret.",
        examples=["BILLING_SECRET"],
    )

    @model_validator(mode="before")
    @classmethod
    def _not_itself(cls, value: Any) -> Any:
        if not isinstance(value, dict | Secret):
            raise ValueError(  # noqa: TRY004
                "the secret itself must not be here, only its place. Try: {file: webhook.secret} or {env: WEBHOOK_SECRET}"
            )
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        self.require_one_of("file", "env", remedy="{file: webhook.secret}")
        return self


class Tls(StrictModel):
    """The authorities that we trust, and the certificate that we show (mTLS). PEM files; they are read again when they change."""

    ca: Path | None = Field(
        None,
        description="The certificates of the authorities that are trusted, in place of the system's. E.g. a company's own CA.",
        examples=["company-ca.pem"],
    )
    certificate: Path | None = Field(
        None,
        description="Our client certificate, followed by the intermediate certificates.",
        examples=["expel.pem"],
    )
    key: Path | None = Field(
        None,
        description="The private key of our certificate, without a password; not readable by others. "
        "Absent: it is in the certificate's file.",
        examples=["expel.key"],
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.certificate is None and self.key is not None:
            raise ValueError("a key needs its certificate. Try: certificate: expel.pem")
        if self.certificate is None and self.ca is None:
            raise ValueError("ca, or certificate and key, are needed. Try: {ca: company-ca.pem}")
        return self


class SecretHeader(StrictModel):
    """A header whose value is secret."""

    name: str = Field(max_length=100, description="The header's name.", examples=["X-Api-Key"])
    value: Secret = Field(
        description="The place of the whole value, e.g. of Basic and the base64 of user:password.",
        examples=[{"file": "api-key.secret"}],
    )


class OAuth(StrictModel):
    """OAuth 2.0 client credentials (RFC 6749, 4.4): requests carry a token from the token server."""

    token_url: str = Field(
        max_length=2000,
        description="The token server's URL: https://… or http://…, without a secret.",
        examples=["https://login.example.org/oauth2/token"],
    )
    client_id: str = Field(
        min_length=1, max_length=500, description="The name of the client at the token server.", examples=["penstock"]
    )
    client_secret: Secret = Field(
        description="The place of the client's secret.", examples=[{"file": "oauth-client.secret"}]
    )
    scope: str | None = Field(
        None,
        max_length=2000,
        description="The requested scopes, separated by spaces.",
        examples=["events.write"],
    )
    audience: str | None = Field(
        None,
        max_length=2000,
        description="The receiver's name, for servers that ask for it.",
        examples=["billing"],
    )
    resource: str | None = Field(
        None,
        max_length=2000,
        description="The receiver's URI (RFC 8707).",
        examples=["https://billing.example.org"],
    )
    tls: Tls | None = Field(
        None,
        description="For the token server, as `tls` is for the receiver.",
        examples=[{"ca": "company-ca.pem"}],
    )

    @field_validator("token_url")
    @classmethod
    def _shows_no_secret(cls, url: str) -> str:
        """Errors name the token server, and Spark's plans show its URL. The messages quote nothing of it."""
        try:
            parts = urlsplit(url)
            names = [name for name, _ in parse_qsl(parts.query, keep_blank_values=True)]
        except ValueError:
            raise ValueError("a URL with https:// or http:// is needed") from None
        if "@" in parts.netloc:
            raise ValueError(f"user and password in a URL are refused. {_PLACE}")
        if parts.fragment or any(map(_SECRET_PARAMETER.search, names)):
            raise ValueError(f"the query looks as if it had a secret, and others see this URL. {_PLACE}")
        return url


class Auth(StrictModel):
    """The proof of our identity in each request: exactly one of bearer, header and oauth."""

    bearer: Secret | None = Field(
        None,
        description="The place of a token, sent as Authorization: Bearer.",
        examples=[{"file": "receiver.token"}],
    )
    header: SecretHeader | None = Field(
        None,
        description="A header with a secret value, e.g. an API key.",
        examples=[{"name": "X-Api-Key", "value": {"file": "api-key.secret"}}],
    )
    oauth: OAuth | None = Field(
        None,
        description="A token from a token server, by OAuth client credentials.",
        examples=[
            {
                "token_url": "https://login.example.org/oauth2/token",
                "client_id": "penstock",
                "client_secret": {"file": "oauth-client.secret"},
            }
        ],
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        self.require_one_of("bearer", "header", "oauth", remedy="{bearer: {file: receiver.token}}")
        return self


class Batching(StrictModel):
    """Limits of one request."""

    max_events: int = Field(
        100,
        ge=1,
        le=10_000,
        description="The most events in a request. 1: each event in a request of its own.",
        examples=[1],
    )
    max_bytes: Size = Field(1_000_000, description="The most bytes in a request's body.", examples=["256KB"])
    max_wait: Duration = Field(0.05, description="How long a request waits for more events.", examples=["1s"])


class LocalRetry(StrictModel):
    """Short retries inside expel, with exponential waits and full jitter. After them the schedule begins."""

    attempts: int = Field(4, ge=1, le=20, description="Number of attempts, including the first.", examples=[2])
    base: Duration = Field(
        0.2,
        description="The longest wait before the second attempt; it doubles with each further one.",
        examples=["1s"],
    )
    max_wait: Duration = Field(5.0, description="The longest wait before any of these attempts.", examples=["10s"])


def _at_most_a_week(seconds: float) -> float:
    if seconds > 7 * DAY_S:
        raise ValueError("a wait between two rounds is at most 7d")
    return seconds


HOUR_S, DAY_S = 3600.0, 86400.0
SCHEDULE = [5.0, 300.0, 0.5 * HOUR_S, 2 * HOUR_S, 5 * HOUR_S, 10 * HOUR_S, 14 * HOUR_S, 20 * HOUR_S, 24 * HOUR_S]
"""The example of Standard Webhooks: ten rounds of attempts over about 75 h. In seconds."""


class Webhook(StrictModel):
    """An HTTP endpoint that receives signed batches (Standard Webhooks)."""

    url: str = Field(
        max_length=2000,
        description="https://… or http://… Private addresses must be allowed with `--allow-networks`.",
        examples=["https://billing.example.org/hook"],
    )
    secret: Secret | None = Field(
        None,
        description="The place of the secret that signs requests. Absent: requests are not signed.",
        examples=[{"file": "webhook.secret"}],
    )
    auth: Auth | None = Field(
        None,
        description="The proof of our identity for receivers that ask for one.",
        examples=[{"bearer": {"file": "receiver.token"}}],
    )
    tls: Tls | None = Field(
        None,
        description="For receivers with a private CA, or that require a client certificate.",
        examples=[{"ca": "company-ca.pem"}],
    )
    body: Body = Field(
        "cloudevents",
        description="cloudevents: an array of CloudEvents with id, source and time. json: an array of the payloads. ndjson: one "
        "payload per line.",
    )
    batch: Batching = Field(Batching(), description="Limits of one request.", examples=[{"max_events": 1}])
    retry: LocalRetry = Field(
        LocalRetry(),
        description="Short retries, before those of `schedule`.",
        examples=[{"attempts": 2}],
    )
    schedule: list[Annotated[Duration, AfterValidator(_at_most_a_week)]] = Field(
        SCHEDULE,
        max_length=32,
        description="The waits before each further round of attempts, after the local retries. Each varies by up to 20 %, and is "
        "never shorter than the receiver requests. While the circuit breaker is open, a wait may be longer: until a little after "
        "the receiver's next test (docs/delivery.md). After the last round: dead letters. Empty: no further round. "
        "With `order: key`, events wait in their stream, and only the sum of the waits counts.",
        examples=[["10s", "5m", "1h"]],
    )
    concurrency: int = Field(8, ge=1, le=256, description="The most requests in flight.", examples=[2])
    rate: int | None = Field(
        None, ge=1, description="The most events per second, of each expel process. Absent: no limit.", examples=[500]
    )
    timeout: Duration = Field(10.0, description="Time limit of one request, including its answer.", examples=["30s"])
    order: Literal["none", "key"] = Field(
        "none",
        description="key: events of one key are delivered in order; the key is the stream's `key`. none: in any order.",
    )
    headers: dict[str, str] = Field(
        default_factory=dict,
        max_length=20,
        description="Sent with each request; no secrets here: they belong in auth.",
        examples=[{"X-Tenant": "shop"}],
    )

    @field_validator("order", mode="before")
    @classmethod
    def _require_order(cls, value: object) -> object:
        if value not in ("none", "key"):
            raise ValueError("must be 'none' or 'key'; the key is the stream's `key`")
        return value
