"""Why a request over HTTP failed: a word for metrics, and words for a person."""

import errno
import ssl
from dataclasses import dataclass
from email.utils import parsedate_to_datetime

from services.core.http.client import BadResponse
from services.core.http.resolver import NameNotFound, RefusedAddress

MAX_RETRY_AFTER = 86_400.0
"""Seconds; a longer Retry-After counts as this."""
MAX_HOLD = 60.0
"""Seconds of a Retry-After that a lane waits, uncommitted (the global retrier waits for the rest), or a token's client."""
BAD_RESPONSE = "bad_answer"
_MAX_EXCERPT = 200
_OUR_SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""This process has no file, memory or port left. That is not the receiver's fault and uses up no attempt."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why events were not delivered.

    reason: a stable word for metrics and dead letters, e.g. `http_503`, `timeout`. detail: for a person, no secrets.
    recoverable: the same attempt may succeed later. retry_after: seconds without an attempt, because the receiver asked for them
    (clamped) or its circuit breaker is open. gone: the receiver wants no more events (410). ours: this process or the broker
    failed, not the receiver; it does not count as an attempt.
    """

    reason: str
    detail: str
    recoverable: bool
    retry_after: float | None = None
    gone: bool = False
    ours: bool = False


def parse_retry_after(text: str | None, *, now: float) -> float | None:
    """Seconds of a Retry-After header (a number or an HTTP date), 0 to MAX_RETRY_AFTER; None when it cannot be parsed.

    `now` in seconds since the epoch.
    """
    if text is None:
        return None
    text = text.strip()
    if text.isascii() and text.isdigit():
        return MAX_RETRY_AFTER if len(text) > 6 else min(float(text), MAX_RETRY_AFTER)
    try:
        moment = parsedate_to_datetime(text[:100])
        return min(max(moment.timestamp() - now, 0.0), MAX_RETRY_AFTER)
    except (ValueError, OverflowError, OSError):
        return None


def classify(error: OSError | BadResponse) -> Failure:
    """The failure for an error of the connection. All are recoverable: the receiver did not refuse the events."""
    match error:
        case TimeoutError():
            return Failure("timeout", "no complete response in time", recoverable=True)
        case BadResponse():
            return Failure(BAD_RESPONSE, f"the response is not HTTP: {error}", recoverable=True)
        case RefusedAddress():
            return Failure("address_refused", str(error), recoverable=True)
        case NameNotFound():
            return Failure("dns", "the host name was not found", recoverable=True)
        case ssl.SSLError():
            return Failure("tls", f"no trusted TLS connection: {_find_tls_cause(error)}", recoverable=True)
        case OSError(errno=number) if number in _OUR_SHORTAGE:
            short = errno.errorcode[number]
            return Failure("own_limits", f"no connection could be opened here: {short}", recoverable=True, ours=True)
        case _:
            return Failure("connection", f"the connection failed: {type(error).__name__}", recoverable=True)


def _find_tls_cause(error: ssl.SSLError) -> str:
    """For a person. The text is OpenSSL's; it has no part of a key."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate is refused: {printable(error.verify_message).rstrip('.')}"
    reason = error.reason or type(error).__name__
    if "ALERT" not in reason:
        return reason.lower().replace("_", " ")
    what = reason.partition("ALERT_")[2].lower().replace("_", " ")
    if "CERTIFICATE" in reason or reason.endswith(_REFUSED_CERTIFICATE):
        return f"the server wants a client certificate, or refuses ours: {what}"
    return f"the server refuses the connection: {what}"


_REFUSED_CERTIFICATE = ("UNKNOWN_CA", "ACCESS_DENIED", "HANDSHAKE_FAILURE")


def excerpt(body: bytes) -> str:
    """The beginning of a response, printable, on one line."""
    return printable(body[:_MAX_EXCERPT].decode(errors="replace"))


def printable(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text).strip()
