"""All reasons for which ingest refuses a request or an event: RFC 9457 problem types, stable for clients (docs/ingest.md).

A detail says in sentences which value is wrong, what was found there and what to send, for the developer of a client. It names
fields, kinds of values, limits and positions. It never repeats a value that the client sent.
"""

from dataclasses import dataclass
from typing import Any

from services.core.http.problem_type import ProblemType

BAD_REQUEST = ProblemType("bad-request", 400, "The HTTP request is malformed")
EMPTY_BODY = ProblemType("empty-body", 400, "The body is empty")
BAD_JSON = ProblemType("bad-json", 400, "Not valid JSON")
TOO_DEEP = ProblemType("too-deep", 400, "JSON is nested too deeply")
BAD_COMPRESSION = ProblemType("bad-compression", 400, "The compressed body is damaged or incomplete")
BAD_ID_CHARACTERS = ProblemType("bad-id-characters", 400, "An event id has control characters")
INCOMPLETE_BODY = ProblemType("incomplete-body", 400, "The body ended early")
NO_VALID_KEY = ProblemType("no-valid-key", 401, "The request has no valid API key")
KEY_IN_URL = ProblemType("key-in-url", 401, "The URL has an API key")
SCOPE_MISSING = ProblemType("scope-missing", 403, "The API key lacks a scope")
NOT_FOUND = ProblemType("not-found", 404, "There is no such resource")
STREAM_NOT_FOUND = ProblemType("stream-not-found", 404, "There is no such stream")
NOT_COMPACTED = ProblemType("not-compacted", 409, "The stream is not compacted")
METHOD_NOT_ALLOWED = ProblemType("method-not-allowed", 405, "This method is not allowed here")
TOO_SLOW = ProblemType("too-slow", 408, "The request did not arrive in time")
STREAM_READ_ONLY = ProblemType("stream-read-only", 409, "Others write the events of this stream")
BODY_TOO_LARGE = ProblemType("body-too-large", 413, "The body is too large")
EVENT_TOO_LARGE = ProblemType("event-too-large", 413, "An event is too large")
TOO_MANY_EVENTS = ProblemType("too-many-events", 413, "The request has too many events")
TOO_MANY_CONTAINERS = ProblemType("too-many-containers", 413, "The JSON has too many arrays and objects")
UNSUPPORTED_MEDIA_TYPE = ProblemType("unsupported-media-type", 415, "This Content-Type is not supported")
UNSUPPORTED_ENCODING = ProblemType("unsupported-encoding", 415, "This Content-Encoding is not supported")
EXPECTATION_FAILED = ProblemType("expectation-failed", 417, "This expectation is not supported")
BAD_HOST = ProblemType("bad-host", 421, "Ingest does not answer to this host name")
NOTHING_ACCEPTED = ProblemType("nothing-accepted", 422, "No event was accepted")
NOT_AN_OBJECT = ProblemType("not-an-object", 422, "An event is not a JSON object")
BAD_ID = ProblemType("bad-id", 422, "An event id is not valid")
BAD_KEY = ProblemType("bad-key", 422, "An ordering key is not valid")
NO_KEY = ProblemType("no-key", 422, "An event of a compacted stream has no key")
BAD_TIME = ProblemType("bad-time", 422, "An event time is not valid")
TOO_OLD = ProblemType("too-old", 422, "An event is older than half the stream's retention")
TIME_OUT_OF_RANGE = ProblemType("time-out-of-range", 422, "An event time is out of range")
BAD_CLOUDEVENT = ProblemType("bad-cloudevent", 422, "Not a valid CloudEvent 1.0")
OVER_QUOTA = ProblemType("over-quota", 429, "The API key's quota is used up")
STREAM_FULL = ProblemType("stream-full", 429, "The stream's capacity is used up; the event was not stored")
HEAD_TOO_LARGE = ProblemType("head-too-large", 431, "The request line or a header is too large")
INTERNAL = ProblemType("internal", 500, "Ingest failed; the outcome is unknown")
UNSUPPORTED_CODING = ProblemType("unsupported-transfer-coding", 501, "This Transfer-Encoding is not supported")
OVERLOADED = ProblemType("overloaded", 503, "Ingest is overloaded; nothing was stored")
BROKER_UNAVAILABLE = ProblemType("broker-unavailable", 503, "The broker is not available; the event was not stored")
OUTCOME_UNKNOWN = ProblemType("outcome-unknown", 503, "The broker did not answer in time; the outcome is unknown")
STORAGE_FULL = ProblemType("storage-full", 507, "The broker's storage is full; the event was not stored")
STREAM_NOT_READY = ProblemType("stream-not-ready", 503, "The stream is not ready in the broker")

ALL = tuple(value for value in list(globals().values()) if isinstance(value, ProblemType))

SEND_AGAIN = "Send the same events with the same ids again."

_KINDS = {
    type(None): "null",
    bool: "a boolean",
    str: "a string",
    int: "an integer",
    float: "a number with a fraction, or beyond 64 bits",
    list: "an array",
    dict: "an object",
}


def kind_of(value: object) -> str:
    """The kind of a parsed JSON value, for a person. Any other value stands for text that is not JSON."""
    return "an empty string" if value == "" else _KINDS.get(type(value), "not valid JSON")


@dataclass(frozen=True, slots=True)
class Refusal:
    """One refused event. index: its position in the request, from 0; in NDJSON its line. detail: for a person."""

    index: int
    kind: ProblemType
    detail: str

    def as_json(self) -> dict[str, Any]:
        """The entry of a 207 or 422 answer. `retry`: whether the same event may be accepted when it is sent again."""
        return {
            "index": self.index,
            "type": self.kind.uri,
            "reason": self.kind.name,
            "detail": self.detail,
            "retry": self.kind.status >= 503,
        }


class Refused(Exception):
    """The whole request is refused.

    retry_after: seconds, for 429 and 503. allow: methods, for 405. ends: the connection ends, because its framing is in doubt.
    """

    def __init__(
        self,
        kind: ProblemType,
        detail: str,
        *,
        retry_after: float | None = None,
        allow: str | None = None,
        ends: bool = False,
    ) -> None:
        super().__init__(detail)
        self.kind, self.detail, self.retry_after, self.allow, self.ends = kind, detail, retry_after, allow, ends


def body_too_large(limit: int) -> Refused:
    """limit: bytes."""
    return Refused(
        BODY_TOO_LARGE,
        f"The body has more than {limit} bytes, or would have them after unpacking. Send fewer events in one request.",
    )
