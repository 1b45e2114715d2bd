"""The answer to a request: from the results of its records to status, headers and body, as bytes for the socket."""

from collections.abc import Mapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from types import MappingProxyType

import msgspec
import orjson
import structlog

from services.core import metrics
from services.core.broker.errors import (
    BrokerClosed,
    BrokerError,
    OutcomeUnknown,
    RecordTooLarge,
    StorageFull,
    Throttled,
    UnknownTopic,
)
from services.core.broker.producer import SendResult
from services.core.http.problem_type import CONTENT_TYPE, ProblemType, problem_json
from services.ingest import problems
from services.ingest.intake import Prepared
from services.ingest.problems import SEND_AGAIN, Refusal, Refused

JSON = b"application/json"
PROBLEM = CONTENT_TYPE.encode()
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
        """The bytes for the socket. date: of now, from `http_date`. head_only: for HEAD."""
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
    """The Retry-After header."""
    return {b"Retry-After": b"%d" % max(1, round(seconds + 0.5))}


def refuse(refused: Refused, *, close: bool = False, **members: object) -> Answer:
    """The problem+json answer to a refused request, and its count. members: extension members of RFC 9457."""
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
    return _date_of(int(seconds))


@lru_cache(maxsize=4)
def _date_of(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()


log = structlog.get_logger()

RETRY_AFTER_S = 2.0
_NOT_STORED = "The event was not stored. Send it with the same id again."
_UNKNOWN = "The event may or may not be stored. Send it with the same id again."
_KINDS: tuple[tuple[type[Exception], ProblemType, str], ...] = (
    (
        RecordTooLarge,
        problems.EVENT_TOO_LARGE,
        "The event is larger than the broker accepts. Send less data in one event.",
    ),
    (OutcomeUnknown, problems.OUTCOME_UNKNOWN, _UNKNOWN),
    (StorageFull, problems.STORAGE_FULL, _NOT_STORED),
    (Throttled, problems.STREAM_FULL, _NOT_STORED),
    (UnknownTopic, problems.STREAM_NOT_READY, f"The stream does not exist in the broker yet. {_NOT_STORED}"),
    (BrokerClosed, problems.BROKER_UNAVAILABLE, f"This process is stopping. {_NOT_STORED}"),
    (BrokerError, problems.BROKER_UNAVAILABLE, _NOT_STORED),
)


def explain(error: Exception) -> tuple[ProblemType, str]:
    """The problem type and detail of a failed record. After any other error the outcome is unknown."""
    for kind, problem, detail in _KINDS:
        if isinstance(error, kind):
            return problem, detail
    log.error("send_failed", kind=type(error).__name__, exc_info=error)
    return problems.OUTCOME_UNKNOWN, _UNKNOWN


def find_failures(result: SendResult, prepared: Prepared) -> tuple[set[int], list[Refusal], float]:
    """Rows that are not certainly stored, their refusals, and the seconds to wait before a retry."""
    failed: set[int] = set()
    refusals: list[Refusal] = []
    retry_after = RETRY_AFTER_S
    known: dict[int, tuple[ProblemType, str]] = {}
    for part in result.parts:
        rows = prepared.rows[part.partition]
        for index, error in part.failed:
            if id(error) not in known:
                known[id(error)] = explain(error)
                if isinstance(error, Throttled) and error.retry_after is not None:
                    retry_after = max(retry_after, error.retry_after)
            failed.add(rows[index])
            refusals.append(Refusal(prepared.indexes[rows[index]], *known[id(error)]))
    return failed, refusals, retry_after


def answer(stored: int, refused: list[Refusal], retry_after: float, ids: list[str] | None) -> Answer:
    """200 if all events were stored, 207 if some, 422 if none. If the broker stored none: 503, 507, or 429 for its limits.

    retry_after: seconds, sent if the broker is the reason for any refusal.
    ids: of the stored events, in the request's order, for clients that asked for them.
    """
    more = {} if ids is None else {"ids": ids}
    if not refused:
        body = orjson.dumps({"accepted": stored, **more}) if more else b'{"accepted":%d}' % stored
        return Answer(200, body)
    refused = sorted(refused, key=lambda refusal: refusal.index)
    listed = [refusal.as_json() for refusal in refused]
    ours = [refusal.kind for refusal in refused if refusal.kind.status >= 503 or refusal.kind is problems.STREAM_FULL]
    if stored:
        later = retry_later(retry_after) if ours else {}
        return Answer(207, orjson.dumps({"accepted": stored, "refused": listed, **more}), headers=later)
    if ours:
        return _unavailable(ours, retry_after)
    detail = (
        f"Refused events: {len(refused)}. None was stored. The member refused has the reason of each, by its index."
    )
    return Answer(422, problem_json(problems.NOTHING_ACCEPTED, detail, accepted=0, refused=listed), PROBLEM)


def _unavailable(kinds: list[ProblemType], retry_after: float) -> Answer:
    """No event is certainly stored: one answer for the whole request. An unknown outcome has priority."""
    kind = problems.OUTCOME_UNKNOWN if problems.OUTCOME_UNKNOWN in kinds else kinds[0]
    outcome = "unknown" if kind is problems.OUTCOME_UNKNOWN else "not stored"
    return refuse(Refused(kind, SEND_AGAIN, retry_after=retry_after), outcome=outcome)
