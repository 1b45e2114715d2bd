"""HTTP answers as bytes, ready for the socket."""

from collections.abc import Mapping
from email.utils import formatdate
from http import HTTPStatus
from types import MappingProxyType

import msgspec

from services.core import metrics
from services.core.problem_type import CONTENT_TYPE, problem_json
from services.ingest.problems import Refused

JSON = b"application/json"
PROBLEM = CONTENT_TYPE.encode()
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}
_NO_HEADERS: Mapping[bytes, bytes] = MappingProxyType({})


class Answer(msgspec.Struct, frozen=True):
    """One answer. close: whether the connection must end with it."""

    status: int
    body: bytes
    media: bytes = JSON
    headers: Mapping[bytes, bytes] = _NO_HEADERS
    close: bool = False

    def render(self, *, close: bool, date: bytes, head_only: bool = False) -> bytes:
        """As it goes over the wire. `date`: of now, see `http_date`. head_only: for HEAD."""
        more = b"".join([b"%b: %b\r\n" % header for header in self.headers.items()]) if self.headers else b""
        if close:
            more += b"Connection: close\r\n"
        return b"HTTP/1.1 %d %b\r\nDate: %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n%b\r\n%b" % (
            self.status,
            _REASONS[self.status],
            date,
            self.media,
            len(self.body),
            more,
            b"" if head_only else self.body,
        )


def retry_later(seconds: float) -> dict[bytes, bytes]:
    """The header that tells when to try again."""
    return {b"Retry-After": b"%d" % max(1, round(seconds + 0.5))}


def refuse(refused: Refused, *, close: bool = False, **members: object) -> Answer:
    """The problem+json answer to a request that is refused as a whole, which is counted here. members: as in RFC 9457."""
    metrics.INGEST_REQUESTS_REFUSED.labels(refused.kind.name).inc()
    headers = {} if refused.retry_after is None else retry_later(refused.retry_after)
    if refused.allow is not None:
        headers[b"Allow"] = refused.allow.encode()
    if refused.kind.status == HTTPStatus.UNAUTHORIZED:
        headers[b"WWW-Authenticate"] = b"Bearer"
    if refused.kind.status == HTTPStatus.UNSUPPORTED_MEDIA_TYPE:
        headers[b"Accept-Encoding"] = b"gzip, zstd"
    body = problem_json(refused.kind, refused.detail, **members)
    return Answer(refused.kind.status, body, PROBLEM, headers, close or refused.ends)


def http_date(seconds: float) -> bytes:
    """The value of a Date header; seconds since the epoch."""
    return formatdate(seconds, usegmt=True).encode()
